//! Arithmetic as Python has it, on numbers, texts and lists.

use super::Error;
use super::ast::Operator;
use super::budget::STEP;
use super::machine::Machine;
use super::value::{SequenceKind, Value};

impl Machine {
    pub(super) fn negative(&self, value: &Value) -> Result<Value, Error> {
        match (value, value.as_integer()) {
            (Value::Float(value), _) => Ok(Value::Float(-value)),
            (_, Some(value)) => value.checked_neg().map(Value::Integer).ok_or_else(too_large),
            _ => Err(self.no_operand("unary -", value)),
        }
    }

    pub(super) fn positive(&self, value: &Value) -> Result<Value, Error> {
        match (value, value.as_integer()) {
            (Value::Float(value), _) => Ok(Value::Float(*value)),
            (_, Some(value)) => Ok(Value::Integer(value)),
            _ => Err(self.no_operand("unary +", value)),
        }
    }

    fn no_operand(&self, operator: &str, value: &Value) -> Error {
        if let Value::Undefined(reason) = value {
            return Error::failed(&**reason);
        }
        Error::failed(format!("bad operand type for {operator}: '{}'", value.type_name()))
    }

    pub(super) fn arithmetic(
        &self,
        operator: Operator,
        left: &Value,
        right: &Value,
    ) -> Result<Value, Error> {
        for value in [left, right] {
            if let Value::Undefined(reason) = value
                && !(operator == Operator::Remainder && left.as_text().is_some())
            {
                return Err(Error::failed(&**reason));
            }
        }
        match (operator, left, right) {
            (Operator::Add, Value::Text(left), Value::Text(right)) => {
                self.budget.spend(left.len() + right.len())?;
                Ok(Value::text([&**left, &**right].concat()))
            }
            (Operator::Add, Value::Sequence(left), Value::Sequence(right))
                if left.kind == right.kind
                    && matches!(left.kind, SequenceKind::List | SequenceKind::Tuple) =>
            {
                self.budget.spend_times(left.items.len() + right.items.len(), STEP)?;
                Value::sequence(left.kind, [&left.items[..], &right.items[..]].concat())
            }
            (Operator::Multiply, Value::Text(_) | Value::Sequence(_), count)
                if count.as_integer().is_some() =>
            {
                self.repeated(left, count.as_integer().unwrap_or_default())
            }
            (Operator::Multiply, count, Value::Text(_) | Value::Sequence(_))
                if count.as_integer().is_some() =>
            {
                self.repeated(right, count.as_integer().unwrap_or_default())
            }
            (Operator::Remainder, Value::Text(format), arguments) => {
                self.percent(format, arguments).map(Value::text)
            }
            (operator, left, right) => match (left.as_integer(), right.as_integer()) {
                (Some(left), Some(right)) => integers(operator, left, right),
                _ => match (left.as_number(), right.as_number()) {
                    (Some(left), Some(right)) => floats(operator, left, right),
                    _ => Err(Error::failed(format!(
                        "unsupported operand types for {}: '{}' and '{}'",
                        operator.symbol(),
                        left.type_name(),
                        right.type_name()
                    ))),
                },
            },
        }
    }

    fn repeated(&self, value: &Value, count: i128) -> Result<Value, Error> {
        let count = usize::try_from(count.max(0)).map_err(|_| too_large())?;
        match value {
            Value::Sequence(sequence)
                if matches!(sequence.kind, SequenceKind::List | SequenceKind::Tuple) =>
            {
                self.budget.spend_times(count.saturating_mul(sequence.items.len()), STEP)?;
                let length = count * sequence.items.len();
                let items = sequence.items.iter().cycle().take(length).cloned();
                Value::sequence(sequence.kind, items.collect())
            }
            Value::Text(text) => {
                self.budget.spend_times(count, text.len())?;
                Ok(Value::text(text.repeat(count)))
            }
            other => Err(self.no_operand("*", other)),
        }
    }
}

pub(super) fn too_large() -> Error {
    Error::failed("a number is too large")
}

fn integers(operator: Operator, left: i128, right: i128) -> Result<Value, Error> {
    let value = match operator {
        Operator::Add => left.checked_add(right),
        Operator::Subtract => left.checked_sub(right),
        Operator::Multiply => left.checked_mul(right),
        Operator::Divide | Operator::FloorDivide | Operator::Remainder if right == 0 => {
            return Err(Error::failed("division by zero"));
        }
        Operator::Divide => return Ok(Value::Float(left as f64 / right as f64)),
        Operator::FloorDivide => left.checked_div_euclid(right).map(|quotient| {
            // Euclid rounds away from the remainder; Python rounds down.
            let exact = quotient * right == left;
            if right < 0 && !exact { quotient - 1 } else { quotient }
        }),
        Operator::Remainder => left.checked_rem_euclid(right).map(|remainder| {
            if right < 0 && remainder != 0 { remainder + right } else { remainder }
        }),
        Operator::Power => match u32::try_from(right) {
            Ok(right) => left.checked_pow(right),
            Err(_) if right > 0 => match left {
                0 | 1 => Some(left),
                -1 => Some(if right % 2 == 0 { 1 } else { -1 }),
                _ => None,
            },
            Err(_) => return floats(operator, left as f64, right as f64),
        },
    };
    value.map(Value::Integer).ok_or_else(too_large)
}

fn floats(operator: Operator, left: f64, right: f64) -> Result<Value, Error> {
    let divides =
        matches!(operator, Operator::Divide | Operator::FloorDivide | Operator::Remainder);
    if divides && right == 0.0 {
        return Err(Error::failed("division by zero"));
    }
    Ok(Value::Float(match operator {
        Operator::Add => left + right,
        Operator::Subtract => left - right,
        Operator::Multiply => left * right,
        Operator::Divide => left / right,
        Operator::FloorDivide => (left / right).floor(),
        Operator::Remainder => {
            let remainder = left % right;
            match remainder != 0.0 && (remainder < 0.0) != (right < 0.0) {
                true => remainder + right,
                false => remainder,
            }
        }
        Operator::Power if left == 0.0 && right < 0.0 => {
            return Err(Error::failed("zero to a negative power"));
        }
        Operator::Power => left.powf(right),
    }))
}
