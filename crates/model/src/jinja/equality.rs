//! Equality, order and membership as Python has them.

use super::Error;
use super::ast::Comparator;
use super::budget::STEP;
use super::machine::Machine;
use super::value::{Sequence, Value};
use std::cmp::Ordering;

impl Machine {
    pub(super) fn equal(&self, left: &Value, right: &Value) -> Result<bool, Error> {
        self.budget.spend(STEP)?;
        Ok(match (left, right) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
            (Value::Text(left), Value::Text(right)) => {
                self.budget.spend(left.len().min(right.len()))?;
                left == right
            }
            (Value::Sequence(left), Value::Sequence(right)) => {
                left.kind == right.kind && self.all_equal(&left.items, &right.items)?
            }
            (Value::Dictionary(left), Value::Dictionary(right)) => {
                if left.entries.len() != right.entries.len() {
                    return Ok(false);
                }
                for (key, value) in &left.entries {
                    match self.entry(&right.entries, key)? {
                        Some(other) if self.equal(value, &other)? => {}
                        _ => return Ok(false),
                    }
                }
                true
            }
            (Value::Range(left), Value::Range(right)) => {
                left.length == right.length
                    && (left.length == 0 || left.start == right.start)
                    && (left.length <= 1 || left.step == right.step)
            }
            (Value::Namespace(left), Value::Namespace(right)) => left == right,
            (Value::Function(left), Value::Function(right)) => left == right,
            (Value::Macro(left), Value::Macro(right)) => std::rc::Rc::ptr_eq(left, right),
            (Value::Loop(left), Value::Loop(right)) => std::rc::Rc::ptr_eq(left, right),
            (left, right) => match (left.as_integer(), right.as_integer()) {
                (Some(left), Some(right)) => left == right,
                _ => match (left.as_number(), right.as_number()) {
                    (Some(left), Some(right)) => left == right,
                    _ => false,
                },
            },
        })
    }

    pub(super) fn all_equal(&self, left: &[Value], right: &[Value]) -> Result<bool, Error> {
        if left.len() != right.len() {
            return Ok(false);
        }
        for (left, right) in left.iter().zip(right) {
            if !self.equal(left, right)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The value of a key.
    pub(super) fn entry(
        &self,
        entries: &[(Value, Value)],
        key: &Value,
    ) -> Result<Option<Value>, Error> {
        for (own, value) in entries {
            if self.equal(own, key)? {
                return Ok(Some(value.clone()));
            }
        }
        Ok(None)
    }

    /// Which of two comes first; `None` if one is not a number.
    pub(super) fn order(&self, left: &Value, right: &Value) -> Result<Option<Ordering>, Error> {
        self.budget.spend(STEP)?;
        match (left, right) {
            (Value::Text(left), Value::Text(right)) => {
                self.budget.spend(left.len().min(right.len()))?;
                Ok(Some(left.cmp(right)))
            }
            (Value::Sequence(left), Value::Sequence(right)) if left.kind == right.kind => {
                self.order_items(left, right)
            }
            _ => match (left.as_integer(), right.as_integer()) {
                (Some(left), Some(right)) => Ok(Some(left.cmp(&right))),
                _ => match (left.as_number(), right.as_number()) {
                    (Some(left), Some(right)) => Ok(left.partial_cmp(&right)),
                    _ => Err(self.no_order(left, right)),
                },
            },
        }
    }

    fn no_order(&self, left: &Value, right: &Value) -> Error {
        for value in [left, right] {
            if let Value::Undefined(reason) = value {
                return Error::failed(&**reason);
            }
        }
        let (left, right) = (left.type_name(), right.type_name());
        Error::failed(format!("'{left}' and '{right}' have no order"))
    }

    fn order_items(&self, left: &Sequence, right: &Sequence) -> Result<Option<Ordering>, Error> {
        for (left, right) in left.items.iter().zip(&right.items) {
            if !self.equal(left, right)? {
                return self.order(left, right);
            }
        }
        Ok(Some(left.items.len().cmp(&right.items.len())))
    }

    pub(super) fn compare(
        &self,
        comparator: Comparator,
        left: &Value,
        right: &Value,
    ) -> Result<bool, Error> {
        let ordered = |wanted: &[Ordering]| {
            Ok(self.order(left, right)?.is_some_and(|order| wanted.contains(&order)))
        };
        match comparator {
            Comparator::Equal => self.equal(left, right),
            Comparator::NotEqual => Ok(!self.equal(left, right)?),
            Comparator::Less => ordered(&[Ordering::Less]),
            Comparator::LessOrEqual => ordered(&[Ordering::Less, Ordering::Equal]),
            Comparator::Greater => ordered(&[Ordering::Greater]),
            Comparator::GreaterOrEqual => ordered(&[Ordering::Greater, Ordering::Equal]),
            Comparator::In => self.contains(right, left),
            Comparator::NotIn => Ok(!self.contains(right, left)?),
        }
    }

    pub(super) fn contains(&self, container: &Value, item: &Value) -> Result<bool, Error> {
        match container {
            Value::Text(text) => {
                let Some(part) = item.as_text() else {
                    let name = item.type_name();
                    let message =
                        format!("'in <string>' requires string as left operand, not {name}");
                    return Err(Error::failed(message));
                };
                self.budget.spend(text.len())?;
                Ok(text.contains(&**part))
            }
            Value::Dictionary(dictionary) => Ok(self.entry(&dictionary.entries, item)?.is_some()),
            container => {
                for candidate in self.items(container)? {
                    if self.equal(&candidate, item)? {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
        }
    }
}
