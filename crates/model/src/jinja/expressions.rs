//! Values of expressions: names, literals, operators, accesses.

use super::Error;
use super::ast::{Arguments, Expression, Link};
use super::budget::STEP;
use super::calls::Given;
use super::machine::Machine;
use super::methods;
use super::value::{SequenceKind, Value};
use std::sync::Arc;

impl Machine {
    pub(super) fn evaluate(&self, expression: &Expression, scope: usize) -> Result<Value, Error> {
        self.budget.nested(|| match expression {
            Expression::None => Ok(Value::None),
            Expression::Bool(value) => Ok(Value::Bool(*value)),
            Expression::Integer(value) => Ok(Value::Integer(*value)),
            Expression::Float(value) => Ok(Value::Float(*value)),
            Expression::Text(text) => Ok(Value::Text(Arc::clone(text))),
            Expression::Name(name) => self.lookup(name, scope),
            Expression::List(items) => Value::list(self.evaluate_all(items, scope)?),
            Expression::Tuple(items) => Value::tuple(self.evaluate_all(items, scope)?),
            Expression::Dictionary(entries) => self.dictionary(entries, scope),
            Expression::Chain(first, links) => {
                let mut value = self.evaluate(first, scope)?;
                for link in links {
                    self.budget.spend(STEP)?;
                    value = self.link(value, link, scope)?;
                }
                Ok(value)
            }
            Expression::Not(value) => Ok(Value::Bool(!self.evaluate(value, scope)?.is_true())),
            Expression::Negative(value) => self.negative(&self.evaluate(value, scope)?),
            Expression::Positive(value) => self.positive(&self.evaluate(value, scope)?),
            Expression::And(items) => self.decide(items, scope, false),
            Expression::Or(items) => self.decide(items, scope, true),
            Expression::Concatenation(items) => {
                let mut text = String::new();
                for item in items {
                    self.write(&self.evaluate(item, scope)?, &mut text)?;
                }
                Ok(Value::text(text))
            }
            Expression::Arithmetic(first, rest) => {
                let mut value = self.evaluate(first, scope)?;
                for (operator, operand) in rest {
                    let operand = self.evaluate(operand, scope)?;
                    value = self.arithmetic(*operator, &value, &operand)?;
                }
                Ok(value)
            }
            Expression::Comparison(first, rest) => {
                let mut left = self.evaluate(first, scope)?;
                for (comparator, right) in rest {
                    let right = self.evaluate(right, scope)?;
                    if !self.compare(*comparator, &left, &right)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Ok(Value::Bool(true))
            }
            Expression::Conditional(it) => {
                match (self.evaluate(&it.test, scope)?.is_true(), &it.otherwise) {
                    (true, _) => self.evaluate(&it.then, scope),
                    (false, Some(otherwise)) => self.evaluate(otherwise, scope),
                    (false, None) => Ok(Value::undefined(
                        "the inline if-expression was false and has no else section",
                    )),
                }
            }
        })
    }

    fn evaluate_all(&self, items: &[Expression], scope: usize) -> Result<Vec<Value>, Error> {
        self.budget.spend_times(items.len(), STEP)?;
        items.iter().map(|item| self.evaluate(item, scope)).collect()
    }

    /// The first item whose truth is `decisive`, else the last.
    fn decide(&self, items: &[Expression], scope: usize, decisive: bool) -> Result<Value, Error> {
        let mut value = Value::None;
        for item in items {
            value = self.evaluate(item, scope)?;
            if value.is_true() == decisive {
                break;
            }
        }
        Ok(value)
    }

    fn dictionary(
        &self,
        entries: &[(Expression, Expression)],
        scope: usize,
    ) -> Result<Value, Error> {
        let mut built: Vec<(Value, Value)> = Vec::new();
        for (key, value) in entries {
            let key = self.evaluate(key, scope)?;
            let value = self.evaluate(value, scope)?;
            self.insert(&mut built, key, value)?;
        }
        Value::dictionary(built)
    }

    /// Puts an entry into a dictionary that is being made.
    pub(super) fn insert(
        &self,
        entries: &mut Vec<(Value, Value)>,
        key: Value,
        value: Value,
    ) -> Result<(), Error> {
        if matches!(&key, Value::Dictionary(_))
            || matches!(&key, Value::Sequence(it) if it.kind != SequenceKind::Tuple)
        {
            return Err(Error::failed(format!("unhashable type: '{}'", key.type_name())));
        }
        for (own, old) in entries.iter_mut() {
            if self.equal(own, &key)? {
                *old = value;
                return Ok(());
            }
        }
        self.budget.spend(2 * STEP)?;
        entries.push((key, value));
        Ok(())
    }

    pub(super) fn link(&self, value: Value, link: &Link, scope: usize) -> Result<Value, Error> {
        match link {
            Link::Attribute(name) => self.attribute(&value, name),
            Link::Item(key) => self.item(&value, &self.evaluate(key, scope)?),
            Link::Slice(parts) => {
                let mut bounds = [None, None, None];
                for (bound, part) in bounds.iter_mut().zip(parts.iter()) {
                    if let Some(part) = part {
                        *bound = Some(self.evaluate(part, scope)?);
                    }
                }
                self.slice(&value, bounds)
            }
            Link::Call(arguments) => {
                let arguments = self.arguments(arguments, scope)?;
                self.budget.nested(|| self.call(&value, arguments))
            }
            Link::Filter(name, arguments) => {
                let arguments = self.arguments(arguments, scope)?;
                self.budget.nested(|| self.filter(name, value, arguments))
            }
            Link::Test { name, arguments, negated } => {
                let arguments = self.arguments(arguments, scope)?;
                Ok(Value::Bool(self.test(name, &value, arguments)? != *negated))
            }
        }
    }

    pub(super) fn arguments(&self, given: &Arguments, scope: usize) -> Result<Given, Error> {
        let mut positional = self.evaluate_all(&given.positional, scope)?;
        if let Some(more) = &given.more {
            positional.extend(self.items(&self.evaluate(more, scope)?)?);
        }
        let mut named = Vec::new();
        for (name, value) in &given.named {
            named.push((Arc::clone(name), self.evaluate(value, scope)?));
        }
        if let Some(more) = &given.more_named {
            let Value::Dictionary(more) = self.evaluate(more, scope)? else {
                return Err(Error::failed("what follows `**` must be a dictionary"));
            };
            self.budget.spend_times(more.entries.len(), STEP)?;
            for (name, value) in &more.entries {
                let name = name.as_text().ok_or_else(|| Error::failed("names must be strings"))?;
                named.push((Arc::clone(name), value.clone()));
            }
        }
        Ok(Given { positional, named })
    }

    /// `value.name`: an attribute, else an item.
    pub(super) fn attribute(&self, value: &Value, name: &str) -> Result<Value, Error> {
        if let Value::Undefined(reason) = value {
            return Err(Error::failed(&**reason));
        }
        if let Some(found) = self.own_attribute(value, name)? {
            return Ok(found);
        }
        if let Value::Dictionary(dictionary) = value
            && let Some(found) = self.entry(&dictionary.entries, &Value::text(name))?
        {
            return Ok(found);
        }
        Ok(self.missing(value, &format!("attribute '{name}'")))
    }

    /// `value[key]`: an item, else an attribute.
    pub(super) fn item(&self, value: &Value, key: &Value) -> Result<Value, Error> {
        let found = match value {
            Value::Undefined(reason) => return Err(Error::failed(&**reason)),
            Value::Dictionary(dictionary) => self.entry(&dictionary.entries, key)?,
            value => self.indexed(value, key)?,
        };
        if let Some(found) = found {
            return Ok(found);
        }
        if let Some(name) = key.as_text()
            && let Some(found) = self.own_attribute(value, name)?
        {
            return Ok(found);
        }
        let mut shown = String::new();
        self.write_repr(key, 0, &mut shown)?;
        shown.truncate(shown.floor_char_boundary(80));
        Ok(self.missing(value, &format!("element {shown}")))
    }

    fn indexed(&self, value: &Value, key: &Value) -> Result<Option<Value>, Error> {
        let Some(index) = key.as_integer() else { return Ok(None) };
        let at = |length: usize| {
            let index = if index < 0 { index + length as i128 } else { index };
            usize::try_from(index).ok().filter(|index| *index < length)
        };
        Ok(match value {
            Value::Text(text) => {
                self.budget.spend(text.len())?;
                let index = at(text.chars().count());
                index
                    .and_then(|index| text.chars().nth(index))
                    .map(|it| Value::text(it.to_string()))
            }
            Value::Sequence(sequence)
                if matches!(sequence.kind, SequenceKind::List | SequenceKind::Tuple) =>
            {
                at(sequence.items.len()).map(|index| sequence.items[index].clone())
            }
            Value::Range(range) => at(range.length).map(|index| range.item(index)),
            _ => None,
        })
    }

    fn missing(&self, value: &Value, what: &str) -> Value {
        Value::undefined(format!("'{}' object has no {what}", value.type_name()))
    }

    fn own_attribute(&self, value: &Value, name: &str) -> Result<Option<Value>, Error> {
        match value {
            Value::Namespace(number) => self.namespace_get(*number, &Value::text(name)),
            Value::Loop(state) => {
                let (index, length) = (state.index.get(), state.items.len());
                let number = |number: usize| Value::Integer(number as i128);
                let neighbour = |index: Option<usize>, which: &str| {
                    let item = index.and_then(|index| state.items.get(index)).cloned();
                    item.unwrap_or_else(|| Value::undefined(format!("there is no {which} item")))
                };
                Ok(Some(match name {
                    "index" => number(index + 1),
                    "index0" => number(index),
                    "revindex" => number(length - index),
                    "revindex0" => number(length - index - 1),
                    "first" => Value::Bool(index == 0),
                    "last" => Value::Bool(index + 1 == length),
                    "length" => number(length),
                    "depth" => number(state.depth),
                    "depth0" => number(state.depth - 1),
                    "previtem" => neighbour(index.checked_sub(1), "previous"),
                    "nextitem" => neighbour(Some(index + 1), "next"),
                    "cycle" | "changed" => Value::method(value.clone(), name),
                    _ => return Ok(None),
                }))
            }
            Value::Cycler(state) => Ok(match name {
                "current" => state.items.get(state.position.get()).cloned(),
                "next" | "reset" => Some(Value::method(value.clone(), name)),
                _ => None,
            }),
            Value::Macro(it) => Ok(match name {
                "name" => Some(Value::Text(Arc::clone(&it.definition.name))),
                "arguments" => {
                    let names = it.definition.parameters.iter();
                    Some(Value::tuple(
                        names.map(|(name, _)| Value::Text(Arc::clone(name))).collect(),
                    )?)
                }
                _ => None,
            }),
            value => Ok(methods::has(value, name).then(|| Value::method(value.clone(), name))),
        }
    }

    fn slice(&self, value: &Value, bounds: [Option<Value>; 3]) -> Result<Value, Error> {
        if let Value::Undefined(reason) = value {
            return Err(Error::failed(&**reason));
        }
        let mut numbers = [None; 3];
        for (number, bound) in numbers.iter_mut().zip(bounds) {
            *number = match bound {
                None | Some(Value::None) => None,
                Some(bound) => match bound.as_integer() {
                    Some(bound) => Some(bound),
                    None => return Ok(self.missing(value, "such slice")),
                },
            };
        }
        let picked = |length: usize| positions(length, numbers);
        match value {
            Value::Text(text) => {
                self.budget.spend_times(text.len(), 4)?;
                let characters: Vec<char> = text.chars().collect();
                let picked = picked(characters.len())?;
                Ok(Value::text(
                    picked.into_iter().map(|index| characters[index]).collect::<String>(),
                ))
            }
            Value::Sequence(sequence)
                if matches!(sequence.kind, SequenceKind::List | SequenceKind::Tuple) =>
            {
                self.budget.spend_times(sequence.items.len(), STEP)?;
                let picked = picked(sequence.items.len())?;
                let items = picked.into_iter().map(|index| sequence.items[index].clone());
                Value::sequence(sequence.kind, items.collect())
            }
            Value::Range(range) => {
                self.budget.spend_times(range.length, STEP)?;
                let picked = picked(range.length)?;
                Value::list(picked.into_iter().map(|index| range.item(index)).collect())
            }
            value => Ok(self.missing(value, "slices")),
        }
    }
}

/// The positions that a slice of Python's picks from `length` items.
fn positions(length: usize, [start, stop, step]: [Option<i128>; 3]) -> Result<Vec<usize>, Error> {
    let length = length as i128;
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Error::failed("slice step cannot be zero"));
    }
    let forwards = step > 0;
    let clamp = |bound: Option<i128>, otherwise: i128| {
        let Some(bound) = bound else { return otherwise };
        let bound = if bound < 0 { bound.saturating_add(length) } else { bound };
        match forwards {
            true => bound.clamp(0, length),
            false => bound.clamp(-1, length - 1),
        }
    };
    let (start, stop) = match forwards {
        true => (clamp(start, 0), clamp(stop, length)),
        false => (clamp(start, length - 1), clamp(stop, -1)),
    };
    let mut picked = Vec::new();
    let mut position = start;
    while if forwards { position < stop } else { position > stop } {
        picked.push(position as usize);
        position = position.saturating_add(step);
    }
    Ok(picked)
}
