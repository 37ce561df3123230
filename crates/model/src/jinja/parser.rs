//! Tokens to expressions; statements are in `statements.rs`. The grammar is Jinja2's, precedences
//! included: a filter binds tighter than an operator, a test as tight as a filter.

use super::Error;
use super::ast::{
    Arguments, Comparator, Conditional, Expression, Link, Operator, Statement, Target,
};
use super::cursor::{Parser, describe};
use super::lexer::TokenKind;
use std::sync::Arc;

impl Parser {
    pub(super) fn template(mut self) -> Result<Vec<Statement>, Error> {
        let (body, _) = self.statements(&[])?;
        Ok(body)
    }

    /// One expression, or a tuple of several with commas between them.
    pub(super) fn tuple(&mut self, conditional: bool, ends: &[&str]) -> Result<Expression, Error> {
        let parse = |parser: &mut Self| match conditional {
            true => parser.expression(),
            false => parser.nested(Self::disjunction),
        };
        let mut items = vec![parse(self)?];
        if !self.is_operator(",") {
            return Ok(items.remove(0));
        }
        while self.skip_operator(",") && !self.is_tuple_end(ends) {
            items.push(parse(self)?);
        }
        Ok(Expression::Tuple(items))
    }

    pub(super) fn is_tuple_end(&self, ends: &[&str]) -> bool {
        match self.current() {
            TokenKind::PrintEnd | TokenKind::BlockEnd | TokenKind::Operator(")") => true,
            TokenKind::Name(name) => ends.contains(&&**name),
            _ => false,
        }
    }

    pub(super) fn expression(&mut self) -> Result<Expression, Error> {
        self.nested(|parser| {
            let mut value = parser.disjunction()?;
            while parser.skip_name("if") {
                let test = parser.disjunction()?;
                let otherwise = match parser.skip_name("else") {
                    true => Some(parser.expression()?),
                    false => None,
                };
                value =
                    Expression::Conditional(Box::new(Conditional { test, then: value, otherwise }));
                // Every further `if` is one level deeper in the tree.
                if parser.is_name("if") {
                    return Err(parser.wrong("conditions in a row: put parentheses around them"));
                }
            }
            Ok(value)
        })
    }

    fn disjunction(&mut self) -> Result<Expression, Error> {
        let mut items = vec![self.conjunction()?];
        while self.skip_name("or") {
            items.push(self.conjunction()?);
        }
        Ok(alone(items, Expression::Or))
    }

    fn conjunction(&mut self) -> Result<Expression, Error> {
        let mut items = vec![self.negation()?];
        while self.skip_name("and") {
            items.push(self.negation()?);
        }
        Ok(alone(items, Expression::And))
    }

    fn negation(&mut self) -> Result<Expression, Error> {
        if !self.skip_name("not") {
            return self.comparison();
        }
        let value = self.nested(Self::negation)?;
        Ok(Expression::Not(Box::new(value)))
    }

    fn comparison(&mut self) -> Result<Expression, Error> {
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let comparator = match self.current() {
                TokenKind::Operator("==") => Comparator::Equal,
                TokenKind::Operator("!=") => Comparator::NotEqual,
                TokenKind::Operator("<") => Comparator::Less,
                TokenKind::Operator("<=") => Comparator::LessOrEqual,
                TokenKind::Operator(">") => Comparator::Greater,
                TokenKind::Operator(">=") => Comparator::GreaterOrEqual,
                TokenKind::Name(name) if &**name == "in" => Comparator::In,
                TokenKind::Name(name)
                    if &**name == "not"
                        && matches!(self.following(), TokenKind::Name(name) if &**name == "in") =>
                {
                    self.take();
                    Comparator::NotIn
                }
                _ => break,
            };
            self.take();
            rest.push((comparator, self.sum()?));
        }
        Ok(match rest.is_empty() {
            true => first,
            false => Expression::Comparison(Box::new(first), rest),
        })
    }

    fn arithmetic(
        &mut self,
        operators: &[(&str, Operator)],
        operand: fn(&mut Self) -> Result<Expression, Error>,
    ) -> Result<Expression, Error> {
        let first = operand(self)?;
        let mut rest = Vec::new();
        while let Some(&(_, operator)) = operators.iter().find(|(it, _)| self.is_operator(it)) {
            self.take();
            rest.push((operator, operand(self)?));
        }
        Ok(match rest.is_empty() {
            true => first,
            false => Expression::Arithmetic(Box::new(first), rest),
        })
    }

    fn sum(&mut self) -> Result<Expression, Error> {
        self.arithmetic(&[("+", Operator::Add), ("-", Operator::Subtract)], Self::concatenation)
    }

    fn concatenation(&mut self) -> Result<Expression, Error> {
        let mut items = vec![self.product()?];
        while self.skip_operator("~") {
            items.push(self.product()?);
        }
        Ok(alone(items, Expression::Concatenation))
    }

    fn product(&mut self) -> Result<Expression, Error> {
        let operators = [
            ("*", Operator::Multiply),
            ("/", Operator::Divide),
            ("//", Operator::FloorDivide),
            ("%", Operator::Remainder),
        ];
        self.arithmetic(&operators, Self::power)
    }

    fn power(&mut self) -> Result<Expression, Error> {
        self.arithmetic(&[("**", Operator::Power)], |parser| parser.unary(true))
    }

    fn unary(&mut self, with_filters: bool) -> Result<Expression, Error> {
        let value = if self.skip_operator("-") {
            Expression::Negative(Box::new(self.nested(|parser| parser.unary(false))?))
        } else if self.skip_operator("+") {
            Expression::Positive(Box::new(self.nested(|parser| parser.unary(false))?))
        } else {
            self.primary()?
        };
        let mut links = Vec::new();
        self.postfix(&mut links)?;
        if with_filters {
            self.filters(&mut links)?;
        }
        Ok(match links.is_empty() {
            true => value,
            false => Expression::Chain(Box::new(value), links),
        })
    }

    fn primary(&mut self) -> Result<Expression, Error> {
        let error = self.unexpected();
        Ok(match self.take() {
            TokenKind::Name(name) => match &*name {
                "true" | "True" => Expression::Bool(true),
                "false" | "False" => Expression::Bool(false),
                "none" | "None" => Expression::None,
                _ => Expression::Name(name),
            },
            TokenKind::Text(mut text) => {
                while let TokenKind::Text(more) = self.current() {
                    text += more;
                    self.take();
                }
                Expression::Text(text.into())
            }
            TokenKind::Integer(value) => Expression::Integer(value),
            TokenKind::Float(value) => Expression::Float(value),
            TokenKind::Operator("(") if self.skip_operator(")") => Expression::Tuple(Vec::new()),
            TokenKind::Operator("(") => {
                let value = self.tuple(true, &[])?;
                self.expect_operator(")")?;
                value
            }
            TokenKind::Operator("[") => Expression::List(self.listed("]", Self::expression)?),
            TokenKind::Operator("{") => Expression::Dictionary(self.listed("}", |parser| {
                let key = parser.expression()?;
                parser.expect_operator(":")?;
                Ok((key, parser.expression()?))
            })?),
            _ => return Err(error),
        })
    }

    /// Items with commas between them up to `end`, which is taken.
    fn listed<T>(
        &mut self,
        end: &str,
        parse: fn(&mut Self) -> Result<T, Error>,
    ) -> Result<Vec<T>, Error> {
        let mut items = Vec::new();
        while !self.is_operator(end) {
            if !items.is_empty() {
                self.expect_operator(",")?;
                if self.is_operator(end) {
                    break;
                }
            }
            items.push(parse(self)?);
        }
        self.expect_operator(end)?;
        Ok(items)
    }

    fn postfix(&mut self, links: &mut Vec<Link>) -> Result<(), Error> {
        loop {
            if self.skip_operator(".") {
                links.push(match self.take() {
                    TokenKind::Name(name) => Link::Attribute(name),
                    TokenKind::Integer(index) => Link::Item(Expression::Integer(index)),
                    other => {
                        let other = describe(&other);
                        return Err(self.wrong(format!("expected a name after `.`, not {other}")));
                    }
                });
            } else if self.skip_operator("[") {
                links.push(self.subscript()?);
            } else if self.is_operator("(") {
                links.push(Link::Call(self.arguments()?));
            } else {
                return Ok(());
            }
        }
    }

    fn subscript(&mut self) -> Result<Link, Error> {
        let mut parts: [Option<Expression>; 3] = [None, None, None];
        let mut colons = 0;
        while !self.is_operator("]") {
            if colons < 2 && self.skip_operator(":") {
                colons += 1;
            } else if parts[colons].is_none() {
                parts[colons] = Some(self.expression()?);
                if colons == 0 && self.is_operator(",") {
                    let mut items = vec![parts[0].take().ok_or_else(|| self.unexpected())?];
                    self.take();
                    items.extend(self.listed("]", Self::expression)?);
                    return Ok(Link::Item(Expression::Tuple(items)));
                }
            } else {
                return Err(self.unexpected());
            }
        }
        self.take();
        match (colons, parts) {
            (0, [Some(item), _, _]) => Ok(Link::Item(item)),
            (0, _) => Err(self.wrong("expected an index between `[` and `]`")),
            (_, parts) => Ok(Link::Slice(Box::new(parts))),
        }
    }

    fn filters(&mut self, links: &mut Vec<Link>) -> Result<(), Error> {
        loop {
            if self.skip_operator("|") {
                links.push(self.filter()?);
            } else if self.skip_name("is") {
                links.push(self.test()?);
            } else if self.is_operator("(") {
                links.push(Link::Call(self.arguments()?));
            } else {
                return Ok(());
            }
        }
    }

    /// A filter after its `|`.
    pub(super) fn filter(&mut self) -> Result<Link, Error> {
        let name = self.dotted_name()?;
        let arguments = match self.is_operator("(") {
            true => self.arguments()?,
            false => Arguments::default(),
        };
        Ok(Link::Filter(name, arguments))
    }

    fn test(&mut self) -> Result<Link, Error> {
        let negated = self.skip_name("not");
        let name = self.dotted_name()?;
        let mut arguments = Arguments::default();
        match self.current() {
            TokenKind::Operator("(") => arguments = self.arguments()?,
            TokenKind::Name(word) if matches!(&**word, "else" | "or" | "and") => {}
            TokenKind::Name(word) if &**word == "is" => {
                return Err(self.wrong("tests cannot be chained with `is`"));
            }
            TokenKind::Name(_)
            | TokenKind::Text(_)
            | TokenKind::Integer(_)
            | TokenKind::Float(_)
            | TokenKind::Operator("[" | "{") => {
                let value = self.nested(Self::primary)?;
                let mut links = Vec::new();
                self.postfix(&mut links)?;
                arguments.positional.push(match links.is_empty() {
                    true => value,
                    false => Expression::Chain(Box::new(value), links),
                });
            }
            _ => {}
        }
        Ok(Link::Test { name, arguments, negated })
    }

    fn dotted_name(&mut self) -> Result<Arc<str>, Error> {
        let mut name = self.expect_name()?.to_string();
        while self.skip_operator(".") {
            name += ".";
            name += &self.expect_name()?;
        }
        Ok(name.into())
    }

    pub(super) fn arguments(&mut self) -> Result<Arguments, Error> {
        self.expect_operator("(")?;
        let mut arguments = Arguments::default();
        let mut first = true;
        while !self.is_operator(")") {
            if !first {
                self.expect_operator(",")?;
                if self.is_operator(")") {
                    break;
                }
            }
            first = false;
            let misplaced = self.wrong("arguments are in the wrong order");
            if self.skip_operator("*") {
                arguments.more = Some(Box::new(self.expression()?));
            } else if self.skip_operator("**") {
                arguments.more_named = Some(Box::new(self.expression()?));
            } else if matches!(self.following(), TokenKind::Operator("="))
                && matches!(self.current(), TokenKind::Name(_))
            {
                let name = self.expect_name()?;
                self.take();
                arguments.named.push((name, self.expression()?));
            } else if !arguments.named.is_empty()
                || arguments.more.is_some()
                || arguments.more_named.is_some()
            {
                return Err(misplaced);
            } else {
                arguments.positional.push(self.expression()?);
            }
        }
        self.expect_operator(")")?;
        Ok(arguments)
    }

    /// What stands on the left of `=` or of `in`.
    pub(super) fn target(&mut self, ends: &[&str], attributes: bool) -> Result<Target, Error> {
        let mut items = vec![self.one_target(attributes)?];
        if !self.is_operator(",") {
            return Ok(items.remove(0));
        }
        while self.skip_operator(",") && !self.is_tuple_end(ends) {
            items.push(self.one_target(attributes)?);
        }
        Ok(Target::Tuple(items))
    }

    fn one_target(&mut self, attributes: bool) -> Result<Target, Error> {
        if self.skip_operator("(") {
            let target = self.nested(|parser| parser.target(&[], attributes))?;
            self.expect_operator(")")?;
            return Ok(target);
        }
        let name = self.expect_name()?;
        if matches!(&*name, "true" | "True" | "false" | "False" | "none" | "None") {
            return Err(self.wrong(format!("cannot assign to `{name}`")));
        }
        if attributes && self.skip_operator(".") {
            return Ok(Target::Attribute(name, self.expect_name()?));
        }
        Ok(Target::Name(name))
    }
}

/// The one item, or all of them as one expression.
fn alone(mut items: Vec<Expression>, all: fn(Vec<Expression>) -> Expression) -> Expression {
    if items.len() == 1 { items.remove(0) } else { all(items) }
}
