//! Tokens to statements: what stands between `{%` and `%}`, and the text around it.

use super::Error;
use super::ast::{Expression, For, Link, Macro, Statement, StatementKind};
use super::cursor::Parser;
use super::lexer::TokenKind;
use std::sync::Arc;

impl Parser {
    /// Statements up to one of the tags in `ends`, whose name is taken and returned; up to the
    /// end of the template where there are none.
    pub(super) fn statements(
        &mut self,
        ends: &[&str],
    ) -> Result<(Vec<Statement>, Arc<str>), Error> {
        self.nested(|parser| {
            let mut body = Vec::new();
            loop {
                let line = parser.line();
                let kind = match parser.take() {
                    TokenKind::Data(text) => StatementKind::Text(text),
                    TokenKind::PrintBegin => {
                        let value = parser.tuple(true, &[])?;
                        parser.end_of(&TokenKind::PrintEnd)?;
                        StatementKind::Print(vec![value])
                    }
                    TokenKind::BlockBegin => {
                        if let TokenKind::Name(name) = parser.current()
                            && ends.contains(&&**name)
                        {
                            let name = Arc::clone(name);
                            parser.take();
                            return Ok((body, name));
                        }
                        parser.statement()?
                    }
                    TokenKind::End if ends.is_empty() => return Ok((body, "".into())),
                    TokenKind::End => {
                        let missing = ends.last().copied().unwrap_or_default();
                        return Err(parser.wrong(format!("`{missing}` is missing")));
                    }
                    _ => return Err(parser.unexpected()),
                };
                body.push(Statement { line, kind });
            }
        })
    }

    fn end_of(&mut self, end: &TokenKind) -> Result<(), Error> {
        if self.current() != end {
            return Err(self.unexpected());
        }
        self.take();
        Ok(())
    }

    fn block_end(&mut self) -> Result<(), Error> {
        self.end_of(&TokenKind::BlockEnd)
    }

    /// A body up to its one end, which is taken whole.
    fn body(&mut self, end: &str) -> Result<Vec<Statement>, Error> {
        self.block_end()?;
        let (body, _) = self.statements(&[end])?;
        Ok(body)
    }

    fn statement(&mut self) -> Result<StatementKind, Error> {
        let line = self.line();
        let name = self.expect_name()?;
        let statement = match &*name {
            "if" => self.if_statement()?,
            "for" => self.for_statement()?,
            "set" => self.set_statement()?,
            "with" => self.with_statement()?,
            "macro" => {
                let name = self.expect_name()?;
                StatementKind::Macro(Arc::new(self.macro_of(name, "endmacro")?))
            }
            "call" => self.call_statement()?,
            "filter" => {
                let filters = self.block_filters(true)?;
                StatementKind::Filter { filters, body: self.body("endfilter")? }
            }
            // Only marks the assistant's words, for training.
            "generation" => StatementKind::Scope(self.body("endgeneration")?),
            "block" => {
                self.expect_name()?;
                self.skip_name("scoped");
                self.block_end()?;
                let (body, _) = self.statements(&["endblock"])?;
                if matches!(self.current(), TokenKind::Name(_)) {
                    self.take();
                }
                StatementKind::Scope(body)
            }
            "print" => {
                let mut values = vec![self.expression()?];
                while self.skip_operator(",") {
                    values.push(self.expression()?);
                }
                StatementKind::Print(values)
            }
            "break" => StatementKind::Break,
            "continue" => StatementKind::Continue,
            "include" | "import" | "from" | "extends" => {
                let message = format!("`{name}`: there is no other template to load");
                return Err(Error::syntax(line, message));
            }
            _ => return Err(Error::syntax(line, format!("unknown tag `{name}`"))),
        };
        self.block_end()?;
        Ok(statement)
    }

    fn if_statement(&mut self) -> Result<StatementKind, Error> {
        let mut branches = Vec::new();
        loop {
            let test = self.tuple(false, &[])?;
            self.block_end()?;
            let (body, end) = self.statements(&["elif", "else", "endif"])?;
            branches.push((test, body));
            let otherwise = match &*end {
                "elif" => continue,
                "else" => self.body("endif")?,
                _ => Vec::new(),
            };
            return Ok(StatementKind::If { branches, otherwise });
        }
    }

    fn for_statement(&mut self) -> Result<StatementKind, Error> {
        let target = self.target(&["in"], false)?;
        if !self.skip_name("in") {
            return Err(self.wrong("expected `in`"));
        }
        let items = self.tuple(false, &["recursive", "if"])?;
        let condition = match self.skip_name("if") {
            true => Some(self.expression()?),
            false => None,
        };
        let recursive = self.skip_name("recursive");
        self.block_end()?;
        let (body, end) = self.statements(&["else", "endfor"])?;
        let otherwise = match &*end {
            "else" => self.body("endfor")?,
            _ => Vec::new(),
        };
        let body = Arc::new(body);
        let parsed = For { target, items, condition, recursive, body, otherwise };
        Ok(StatementKind::For(Box::new(parsed)))
    }

    fn set_statement(&mut self) -> Result<StatementKind, Error> {
        let target = self.target(&[], true)?;
        if self.skip_operator("=") {
            return Ok(StatementKind::Set { target, value: self.tuple(true, &[])? });
        }
        let filters = self.block_filters(false)?;
        Ok(StatementKind::SetBlock { target, filters, body: self.body("endset")? })
    }

    /// Filters of a block; the first stands without its `|` where `inline`.
    fn block_filters(&mut self, inline: bool) -> Result<Vec<Link>, Error> {
        let mut filters = Vec::new();
        if inline {
            filters.push(self.filter()?);
        }
        while self.skip_operator("|") {
            filters.push(self.filter()?);
        }
        Ok(filters)
    }

    fn with_statement(&mut self) -> Result<StatementKind, Error> {
        let mut bindings = Vec::new();
        while *self.current() != TokenKind::BlockEnd {
            if !bindings.is_empty() {
                self.expect_operator(",")?;
            }
            let target = self.target(&[], false)?;
            self.expect_operator("=")?;
            bindings.push((target, self.expression()?));
        }
        Ok(StatementKind::With { bindings, body: self.body("endwith")? })
    }

    /// A macro from its parameters to its end.
    fn macro_of(&mut self, name: Arc<str>, end: &str) -> Result<Macro, Error> {
        let mut parameters: Vec<(Arc<str>, Option<Expression>)> = Vec::new();
        if self.is_operator("(") || end == "endmacro" {
            self.expect_operator("(")?;
            while !self.is_operator(")") {
                if !parameters.is_empty() {
                    self.expect_operator(",")?;
                }
                let parameter = self.expect_name()?;
                let default = match self.skip_operator("=") {
                    true => Some(self.expression()?),
                    false => None,
                };
                parameters.push((parameter, default));
            }
            self.expect_operator(")")?;
        }
        if end == "endcall" {
            let (takes_more, takes_named, takes_caller) = (false, false, false);
            let body = Vec::new();
            return Ok(Macro { name, parameters, body, takes_more, takes_named, takes_caller });
        }
        let from = self.position();
        let body = self.body(end)?;
        let [takes_more, takes_named, takes_caller] =
            ["varargs", "kwargs", "caller"].map(|word| self.mentions(from, word));
        Ok(Macro { name, parameters, body, takes_more, takes_named, takes_caller })
    }

    fn call_statement(&mut self) -> Result<StatementKind, Error> {
        let caller = self.macro_of("caller".into(), "endcall")?;
        let call = self.expression()?;
        let Expression::Chain(callee, mut links) = call else {
            return Err(self.wrong("`call` expects a call"));
        };
        let Some(Link::Call(arguments)) = links.pop() else {
            return Err(self.wrong("`call` expects a call"));
        };
        let callee = match links.is_empty() {
            true => *callee,
            false => Expression::Chain(callee, links),
        };
        let body = self.body("endcall")?;
        let caller = Arc::new(Macro { body, ..caller });
        Ok(StatementKind::Call { caller, callee, arguments })
    }
}
