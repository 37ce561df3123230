//! Jinja2 as chat templates use it, with a bound on everything a template can do.
//!
//! Templates come from model files, which strangers write, and must render as in Python: the text
//! is what the model sees. So this interpreter does what Jinja2's does (undefined values, `%`,
//! Python's methods and its way to print), in the setting of Hugging Face's `transformers`: blocks
//! are trimmed, lists and dictionaries cannot be changed, no other template can be loaded. And it
//! counts: [`Budget`] bounds time, memory, output and stack together.

mod ast;
mod budget;
mod calls;
mod conversions;
mod cursor;
mod equality;
mod expressions;
mod filters;
mod format;
mod json;
mod lexer;
mod machine;
mod methods;
mod operators;
mod parser;
mod percent;
mod predicates;
mod selections;
mod statements;
mod strings;
mod text;
mod value;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub(crate) use budget::Budget;
pub(crate) use value::Value;

/// Longer than any template by far; reading one takes memory in proportion.
const SOURCE_BYTES_MAX: usize = 1 << 20;

/// What kind of thing went wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    /// The source is no template.
    Syntax,
    /// The template itself said no, by `raise_exception`.
    Raised,
    /// The template did something that its values do not allow.
    Failed,
    /// The template did more than it may.
    Exhausted,
}

/// Why a template has no text.
#[derive(Clone, Debug)]
pub(crate) struct Error {
    pub(crate) kind: ErrorKind,
    pub(crate) message: String,
    /// Counted from 1.
    line: Option<u32>,
}

impl Error {
    fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), line: None }
    }

    fn failed(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Failed, message)
    }

    fn syntax(line: u32, message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Syntax, message).at(line)
    }

    /// Names the line, unless one further in is named already.
    fn at(mut self, line: u32) -> Self {
        self.line.get_or_insert(line);
        self
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.line {
            Some(line) => write!(formatter, "line {line}: {}", self.message),
            None => formatter.write_str(&self.message),
        }
    }
}

/// A template, parsed.
#[derive(Debug)]
pub(crate) struct Template {
    body: Vec<ast::Statement>,
}

impl Template {
    pub(crate) fn parse(source: &str) -> Result<Self, Error> {
        if source.len() > SOURCE_BYTES_MAX {
            let message = format!("{} bytes; at most {SOURCE_BYTES_MAX} are read", source.len());
            return Err(Error::new(ErrorKind::Syntax, message));
        }
        let tokens = lexer::tokenize(source)?;
        Ok(Self { body: cursor::Parser::new(tokens).template()? })
    }

    /// The template's text with these variables.
    pub(crate) fn render(
        &self,
        variables: Vec<(Arc<str>, Value)>,
        budget: Budget,
    ) -> Result<String, Error> {
        machine::Machine::new(variables, budget).run(&self.body)
    }
}
