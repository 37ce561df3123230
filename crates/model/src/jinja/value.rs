//! What a template's expressions are: Python's values, as far as templates meet them. Lists and
//! dictionaries never change, so only namespaces could contain themselves; those are numbers here.

use super::Error;
use super::ast::Macro;
use super::budget::NESTING_MAX;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

#[derive(Clone, Debug)]
pub(crate) enum Value {
    /// With what to say where it is used as if it were there.
    Undefined(Arc<str>),
    None,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text(Arc<str>),
    Sequence(Rc<Sequence>),
    Range(Rc<Range>),
    Dictionary(Rc<Dictionary>),
    /// Items that can be had once: what Python's generators are.
    Stream(Rc<Stream>),
    Namespace(usize),
    Macro(Rc<MacroValue>),
    Function(Function),
    Method(Rc<(Value, Arc<str>)>),
    Loop(Rc<Loop>),
    Cycler(Rc<Cycler>),
    Joiner(Rc<Joiner>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SequenceKind {
    List,
    Tuple,
    Keys,
    Values,
    Items,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(super) kind: SequenceKind,
    pub(super) items: Vec<Value>,
    nesting: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(super) start: i128,
    pub(super) stop: i128,
    pub(super) step: i128,
    pub(super) length: usize,
}

#[derive(Debug)]
pub(crate) struct Dictionary {
    /// No key twice; in the order they were put in.
    pub(super) entries: Vec<(Value, Value)>,
    nesting: u16,
}

#[derive(Debug)]
pub(crate) struct Stream {
    items: RefCell<VecDeque<Value>>,
    nesting: u16,
}

/// A macro and the scope it was defined in.
#[derive(Debug)]
pub(crate) struct MacroValue {
    pub(super) definition: Arc<Macro>,
    pub(super) scope: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    Range,
    Dict,
    Namespace,
    Cycler,
    Joiner,
    RaiseException,
    StrftimeNow,
}

/// The variable `loop`.
#[derive(Debug)]
pub(crate) struct Loop {
    pub(super) items: Vec<Value>,
    pub(super) index: Cell<usize>,
    pub(super) depth: usize,
    /// What `loop.changed` was asked last, printed: a loop must not hold itself.
    pub(super) last: RefCell<Option<String>>,
    /// Of a recursive loop: the statement, to run again.
    pub(super) recursion: Option<Recursion>,
    nesting: u16,
}

#[derive(Clone, Debug)]
pub(crate) struct Recursion {
    pub(super) target: super::ast::Target,
    pub(super) body: Arc<Vec<super::ast::Statement>>,
    pub(super) scope: usize,
}

#[derive(Debug)]
pub(crate) struct Cycler {
    pub(super) items: Vec<Value>,
    pub(super) position: Cell<usize>,
    nesting: u16,
}

#[derive(Debug)]
pub(crate) struct Joiner {
    pub(super) separator: Arc<str>,
    pub(super) used: Cell<bool>,
}

impl Value {
    pub(crate) fn text(text: impl Into<Arc<str>>) -> Self {
        Self::Text(text.into())
    }

    pub(super) fn undefined(reason: impl Into<Arc<str>>) -> Self {
        Self::Undefined(reason.into())
    }

    pub(crate) fn list(items: Vec<Value>) -> Result<Self, Error> {
        Self::sequence(SequenceKind::List, items)
    }

    pub(super) fn tuple(items: Vec<Value>) -> Result<Self, Error> {
        Self::sequence(SequenceKind::Tuple, items)
    }

    pub(super) fn sequence(kind: SequenceKind, items: Vec<Value>) -> Result<Self, Error> {
        let nesting = nesting_over(&items)?;
        Ok(Self::Sequence(Rc::new(Sequence { kind, items, nesting })))
    }

    /// `entries` have no key twice.
    pub(crate) fn dictionary(entries: Vec<(Value, Value)>) -> Result<Self, Error> {
        let nesting = nesting_over(entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(Self::Dictionary(Rc::new(Dictionary { entries, nesting })))
    }

    pub(super) fn stream(items: Vec<Value>) -> Result<Self, Error> {
        let nesting = nesting_over(&items)?;
        Ok(Self::Stream(Rc::new(Stream { items: RefCell::new(items.into()), nesting })))
    }

    pub(super) fn method(of: Value, name: &str) -> Self {
        Self::Method(Rc::new((of, name.into())))
    }

    pub(super) fn cycler(items: Vec<Value>) -> Result<Self, Error> {
        let nesting = nesting_over(&items)?;
        Ok(Self::Cycler(Rc::new(Cycler { items, position: Cell::new(0), nesting })))
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    pub(super) fn as_text(&self) -> Option<&Arc<str>> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A whole number, and Python's booleans are whole numbers.
    pub(super) fn as_integer(&self) -> Option<i128> {
        match self {
            Self::Integer(value) => Some(*value),
            Self::Bool(value) => Some(i128::from(*value)),
            _ => None,
        }
    }

    pub(super) fn as_number(&self) -> Option<f64> {
        match self {
            Self::Float(value) => Some(*value),
            _ => self.as_integer().map(|value| value as f64),
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(value) => *value,
            Self::Integer(value) => *value != 0,
            Self::Float(value) => *value != 0.0,
            Self::Text(text) => !text.is_empty(),
            Self::Sequence(sequence) => !sequence.items.is_empty(),
            Self::Range(range) => range.length > 0,
            Self::Dictionary(dictionary) => !dictionary.entries.is_empty(),
            Self::Loop(it) => !it.items.is_empty(),
            _ => true,
        }
    }

    /// Python's name of the type, for messages.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Integer(_) => "int",
            Self::Float(_) => "float",
            Self::Text(_) => "str",
            Self::Sequence(sequence) => match sequence.kind {
                SequenceKind::List => "list",
                SequenceKind::Tuple => "tuple",
                SequenceKind::Keys => "dict_keys",
                SequenceKind::Values => "dict_values",
                SequenceKind::Items => "dict_items",
            },
            Self::Range(_) => "range",
            Self::Dictionary(_) => "dict",
            Self::Stream(_) => "generator",
            Self::Namespace(_) => "Namespace",
            Self::Macro(_) => "Macro",
            Self::Function(_) => "function",
            Self::Method(_) => "method",
            Self::Loop(_) => "LoopContext",
            Self::Cycler(_) => "Cycler",
            Self::Joiner(_) => "Joiner",
        }
    }

    fn nesting(&self) -> u16 {
        match self {
            Self::Sequence(it) => it.nesting,
            Self::Dictionary(it) => it.nesting,
            Self::Stream(it) => it.nesting,
            Self::Loop(it) => it.nesting,
            Self::Cycler(it) => it.nesting,
            // A method is of a value that is no method.
            Self::Method(it) => it.0.nesting(),
            _ => 0,
        }
    }
}

/// The nesting of a thing that contains `items`.
fn nesting_over<'a>(items: impl IntoIterator<Item = &'a Value>) -> Result<u16, Error> {
    let nesting = 1 + items.into_iter().map(Value::nesting).max().unwrap_or(0);
    if nesting > NESTING_MAX {
        let message = format!("values are nested more than {NESTING_MAX} levels deep");
        return Err(Error::new(super::ErrorKind::Exhausted, message));
    }
    Ok(nesting)
}

impl Loop {
    pub(super) fn new(
        items: Vec<Value>,
        depth: usize,
        recursion: Option<Recursion>,
    ) -> Result<Self, Error> {
        let nesting = nesting_over(&items)?;
        let (index, last) = (Cell::new(0), RefCell::new(None));
        Ok(Self { items, index, depth, last, recursion, nesting })
    }
}

impl Stream {
    /// All items that are left; then there are none.
    pub(super) fn drain(&self) -> Vec<Value> {
        self.items.take().into()
    }

    pub(super) fn next(&self) -> Option<Value> {
        self.items.borrow_mut().pop_front()
    }
}

impl Range {
    pub(super) fn item(&self, index: usize) -> Value {
        Value::Integer(self.start + index as i128 * self.step)
    }
}
