//! The parser's place among the tokens: looking, taking, expecting.

use super::Error;
use super::lexer::{Token, TokenKind};
use std::sync::Arc;

/// How deep a template may be nested: real ones reach about twenty.
const DEPTH_MAX: u32 = 100;

pub(super) struct Parser {
    tokens: Vec<Token>,
    next: usize,
    depth: u32,
}

impl Parser {
    /// `tokens` end with [`TokenKind::End`].
    pub(super) fn new(tokens: Vec<Token>) -> Self {
        Self { tokens, next: 0, depth: 0 }
    }

    pub(super) fn current(&self) -> &TokenKind {
        &self.tokens[self.next].kind
    }

    pub(super) fn following(&self) -> &TokenKind {
        &self.tokens[(self.next + 1).min(self.tokens.len() - 1)].kind
    }

    pub(super) fn position(&self) -> usize {
        self.next
    }

    /// Whether a name is among the tokens since this position.
    pub(super) fn mentions(&self, from: usize, name: &str) -> bool {
        let tokens = &self.tokens[from..self.next];
        tokens.iter().any(|token| matches!(&token.kind, TokenKind::Name(it) if &**it == name))
    }

    pub(super) fn line(&self) -> u32 {
        self.tokens[self.next].line
    }

    /// Takes the current token; the last one stays.
    pub(super) fn take(&mut self) -> TokenKind {
        let kind = self.current().clone();
        self.next = (self.next + 1).min(self.tokens.len() - 1);
        kind
    }

    pub(super) fn wrong(&self, message: impl Into<String>) -> Error {
        Error::syntax(self.line(), message)
    }

    pub(super) fn unexpected(&self) -> Error {
        self.wrong(format!("unexpected {}", describe(self.current())))
    }

    /// Runs one level of nesting further down.
    pub(super) fn nested<T>(
        &mut self,
        parse: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        if self.depth == DEPTH_MAX {
            return Err(self.wrong(format!("nested more than {DEPTH_MAX} levels deep")));
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    pub(super) fn is_operator(&self, operator: &str) -> bool {
        matches!(self.current(), TokenKind::Operator(it) if *it == operator)
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.current(), TokenKind::Name(it) if &**it == name)
    }

    pub(super) fn skip_operator(&mut self, operator: &str) -> bool {
        let found = self.is_operator(operator);
        if found {
            self.take();
        }
        found
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.take();
        }
        found
    }

    pub(super) fn expect_operator(&mut self, operator: &str) -> Result<(), Error> {
        if self.skip_operator(operator) {
            return Ok(());
        }
        Err(self.wrong(format!("expected `{operator}`, not {}", describe(self.current()))))
    }

    pub(super) fn expect_name(&mut self) -> Result<Arc<str>, Error> {
        match self.take() {
            TokenKind::Name(name) => Ok(name),
            other => Err(self.wrong(format!("expected a name, not {}", describe(&other)))),
        }
    }
}

pub(super) fn describe(token: &TokenKind) -> String {
    match token {
        TokenKind::Data(_) => "text".to_owned(),
        TokenKind::BlockBegin => "`{%`".to_owned(),
        TokenKind::BlockEnd => "`%}`".to_owned(),
        TokenKind::PrintBegin => "`{{`".to_owned(),
        TokenKind::PrintEnd => "`}}`".to_owned(),
        TokenKind::Name(name) => format!("`{name}`"),
        TokenKind::Text(_) => "a string".to_owned(),
        TokenKind::Integer(value) => format!("`{value}`"),
        TokenKind::Float(value) => format!("`{value}`"),
        TokenKind::Operator(operator) => format!("`{operator}`"),
        TokenKind::End => "the end of the template".to_owned(),
    }
}
