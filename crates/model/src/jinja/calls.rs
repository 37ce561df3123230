//! Calls: arguments, macros, the global functions, loops that call themselves.

use super::budget::STEP;
use super::machine::Machine;
use super::value::{Function, Joiner, Loop, MacroValue, Range, Value};
use super::{Error, ErrorKind};
use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

/// The longest range of Jinja2's sandbox.
const RANGE_MAX: usize = 100_000;

/// Arguments of a call.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Arc<str>, Value)>,
}

impl Given {
    /// The arguments by their parameters' names; what is left over is an error.
    pub(super) fn bind<const N: usize>(
        self,
        what: &str,
        parameters: [&str; N],
    ) -> Result<[Option<Value>; N], Error> {
        let mut bound = [const { None }; N];
        if self.positional.len() > N {
            let count = self.positional.len();
            return Err(Error::failed(format!("{what} takes {N} arguments at most, not {count}")));
        }
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match parameters.iter().position(|parameter| *parameter == &*name) {
                Some(index) if bound[index].is_none() => bound[index] = Some(value),
                Some(_) => return Err(Error::failed(format!("{what}: '{name}' is given twice"))),
                None => return Err(Error::failed(format!("{what} has no argument '{name}'"))),
            }
        }
        Ok(bound)
    }
}

/// An argument that must be there.
pub(super) fn required(value: Option<Value>, what: &str, name: &str) -> Result<Value, Error> {
    value.ok_or_else(|| Error::failed(format!("{what}: the argument '{name}' is missing")))
}

impl Machine {
    pub(super) fn call(&self, callee: &Value, given: Given) -> Result<Value, Error> {
        match callee {
            Value::Macro(it) => self.call_macro(it, given).map(Value::text),
            Value::Function(function) => self.call_function(*function, given),
            Value::Method(method) => match &method.0 {
                Value::Loop(state) => self.loop_method(state, &method.1, given),
                Value::Cycler(state) => {
                    let [] = given.bind("this method", [])?;
                    let position = state.position.get();
                    if &*method.1 == "reset" {
                        state.position.set(0);
                        return Ok(Value::None);
                    }
                    state.position.set((position + 1) % state.items.len());
                    Ok(state.items[position].clone())
                }
                value => self.method(value, &method.1, given),
            },
            Value::Loop(state) => self.call_loop(state, given).map(Value::text),
            Value::Joiner(joiner) => Ok(match joiner.used.replace(true) {
                true => Value::Text(Arc::clone(&joiner.separator)),
                false => Value::text(""),
            }),
            Value::Undefined(reason) => Err(Error::failed(&**reason)),
            other => Err(Error::failed(format!("'{}' object is not callable", other.type_name()))),
        }
    }

    fn call_macro(&self, value: &MacroValue, given: Given) -> Result<String, Error> {
        let definition = &value.definition;
        let name = &definition.name;
        let count = definition.parameters.len();
        let scope = self.open_scope(value.scope)?;
        let mut positional = given.positional.into_iter();
        let mut named = given.named;
        let mut take_named = |wanted: &str| {
            let index = named.iter().position(|(own, _)| &**own == wanted)?;
            Some(named.remove(index).1)
        };
        let mut arguments: Vec<Option<Value>> = Vec::new();
        for (parameter, _) in &definition.parameters {
            arguments.push(positional.next().or_else(|| take_named(parameter)));
        }
        if definition.takes_caller {
            let caller = take_named("caller").unwrap_or(Value::undefined("No caller defined"));
            self.define(&"caller".into(), caller, scope)?;
        }
        if definition.takes_named {
            let entries = named.drain(..).map(|(name, value)| (Value::Text(name), value));
            self.define(&"kwargs".into(), Value::dictionary(entries.collect())?, scope)?;
        } else if let Some((other, _)) = named.first() {
            let message = format!("macro '{name}' takes no keyword argument '{other}'");
            return Err(Error::failed(message));
        }
        let more: Vec<Value> = positional.collect();
        if definition.takes_more {
            self.define(&"varargs".into(), Value::tuple(more)?, scope)?;
        } else if !more.is_empty() {
            let message = format!("macro '{name}' takes not more than {count} argument(s)");
            return Err(Error::failed(message));
        }
        for ((parameter, default), argument) in definition.parameters.iter().zip(arguments) {
            let argument = match (argument, default) {
                (Some(argument), _) => argument,
                (None, Some(default)) => self.evaluate(default, scope)?,
                (None, None) => {
                    Value::undefined(format!("parameter '{parameter}' was not provided"))
                }
            };
            self.define(parameter, argument, scope)?;
        }
        let text = self.captured(&definition.body, scope)?;
        self.close_scope(scope);
        Ok(text)
    }

    /// `loop(items)` of a recursive loop.
    fn call_loop(&self, state: &Rc<Loop>, given: Given) -> Result<String, Error> {
        let Some(recursion) = &state.recursion else {
            return Err(Error::failed("only a loop marked as `recursive` can be called"));
        };
        let [items] = given.bind("loop", ["iterable"])?;
        let items = self.items(&required(items, "loop", "iterable")?)?;
        let inner = Rc::new(Loop::new(items, state.depth + 1, Some(recursion.clone()))?);
        let mut text = String::new();
        self.iterate(&inner, &recursion.target, &recursion.body, recursion.scope, &mut text)?;
        Ok(text)
    }

    fn loop_method(&self, state: &Loop, name: &str, given: Given) -> Result<Value, Error> {
        let values = given.positional;
        if name == "cycle" {
            if values.is_empty() {
                return Err(Error::failed("no items for cycling given"));
            }
            return Ok(values[state.index.get() % values.len()].clone());
        }
        let mut shown = String::new();
        self.write_repr(&Value::tuple(values)?, 0, &mut shown)?;
        let changed = state.last.replace(Some(shown.clone())) != Some(shown);
        Ok(Value::Bool(changed))
    }

    fn call_function(&self, function: Function, given: Given) -> Result<Value, Error> {
        match function {
            Function::Range => self.range(given),
            Function::Dict => Value::dictionary(self.entries_of(given)?),
            Function::Namespace => {
                let entries = self.entries_of(given)?;
                self.new_namespace(entries)
            }
            Function::Cycler => match given.positional.is_empty() {
                true => Err(Error::failed("at least one item has to be provided")),
                false => Value::cycler(given.positional),
            },
            Function::Joiner => {
                let [separator] = given.bind("joiner", ["sep"])?;
                let separator = match separator {
                    Some(separator) => self.expect_text(&separator, "joiner: sep")?,
                    None => ", ".into(),
                };
                Ok(Value::Joiner(Rc::new(Joiner { separator, used: Cell::new(false) })))
            }
            Function::RaiseException => {
                let [message] = given.bind("raise_exception", ["message"])?;
                let message = self.to_text(&required(message, "raise_exception", "message")?)?;
                Err(Error::new(ErrorKind::Raised, message))
            }
            Function::StrftimeNow => {
                let [format] = given.bind("strftime_now", ["format"])?;
                let format = required(format, "strftime_now", "format")?;
                let format = self.expect_text(&format, "strftime_now: format")?;
                self.budget.spend_times(format.len(), 10)?;
                strftime_now(&format).map(Value::text)
            }
        }
    }

    fn entries_of(&self, given: Given) -> Result<Vec<(Value, Value)>, Error> {
        let mut entries = Vec::new();
        if given.positional.len() > 1 {
            return Err(Error::failed("dict takes one argument at most"));
        }
        match given.positional.first() {
            None => {}
            Some(Value::Dictionary(other)) => {
                self.budget.spend_times(other.entries.len(), 2 * STEP)?;
                entries.extend(other.entries.iter().cloned());
            }
            Some(Value::Namespace(number)) => entries = self.namespace_entries(*number)?,
            Some(pairs) => {
                for pair in self.items(pairs)? {
                    let pair = self.items(&pair)?;
                    let [key, value] = pair.try_into().map_err(|_| {
                        Error::failed("dict takes a dictionary or pairs of a key and a value")
                    })?;
                    self.insert(&mut entries, key, value)?;
                }
            }
        }
        for (name, value) in given.named {
            self.insert(&mut entries, Value::Text(name), value)?;
        }
        Ok(entries)
    }

    fn range(&self, given: Given) -> Result<Value, Error> {
        let [first, second, third] = given.bind("range", ["start", "stop", "step"])?;
        let number = |value: Option<Value>, otherwise: i128| match value {
            Some(value) => self.expect_integer(&value, "range"),
            None => Ok(otherwise),
        };
        let (start, stop) = match second {
            Some(_) => (number(first, 0)?, number(second, 0)?),
            None => (0, number(Some(required(first, "range", "stop")?), 0)?),
        };
        let step = number(third, 1)?;
        if step == 0 {
            return Err(Error::failed("range() arg 3 must not be zero"));
        }
        let span = match step > 0 {
            true => stop.saturating_sub(start),
            false => start.saturating_sub(stop),
        };
        let step_size = step.unsigned_abs().min(i128::MAX as u128) as i128;
        let length = if span <= 0 { 0 } else { (span - 1) / step_size + 1 };
        match usize::try_from(length) {
            Ok(length) if length <= RANGE_MAX => {
                Ok(Value::Range(Rc::new(Range { start, stop, step, length })))
            }
            _ => Err(Error::new(
                ErrorKind::Exhausted,
                format!("a range of {length}; at most {RANGE_MAX} are allowed"),
            )),
        }
    }
}

/// Formats the one day there is here, 26 July 2024 at midnight.
fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        let mut directive = characters.next();
        // `%-d` is a day without its zero, which none of this day's numbers has but the month.
        let bare = directive == Some('-');
        if bare {
            directive = characters.next();
        }
        text.push_str(match directive {
            Some('Y') => "2024",
            Some('y') => "24",
            Some('m') if bare => "7",
            Some('m') => "07",
            Some('B') => "July",
            Some('b' | 'h') => "Jul",
            Some('d' | 'e') => "26",
            Some('j') => "208",
            Some('A') => "Friday",
            Some('a') => "Fri",
            Some('w' | 'u') => "5",
            Some('H' | 'M' | 'S') if bare => "0",
            Some('H' | 'M' | 'S') => "00",
            Some('I') => "12",
            Some('p') => "AM",
            Some('F') => "2024-07-26",
            Some('T' | 'X') => "00:00:00",
            Some('R') => "00:00",
            Some('D' | 'x') => "07/26/24",
            Some('%') if !bare => "%",
            other => {
                let directive = other.map(String::from).unwrap_or_default();
                let message = format!("strftime_now: unknown directive %{directive}");
                return Err(Error::failed(message));
            }
        });
    }
    Ok(text)
}
