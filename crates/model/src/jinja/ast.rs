//! A parsed template. Chains of operators and of accesses are lists, so that the tree is only as
//! deep as the source is nested, and its depth is what the parser allows.

use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Statement {
    pub(super) line: u32,
    pub(super) kind: StatementKind,
}

#[derive(Debug)]
pub(super) enum StatementKind {
    Text(String),
    Print(Vec<Expression>),
    If {
        branches: Vec<(Expression, Vec<Statement>)>,
        otherwise: Vec<Statement>,
    },
    For(Box<For>),
    Set {
        target: Target,
        value: Expression,
    },
    SetBlock {
        target: Target,
        filters: Vec<Link>,
        body: Vec<Statement>,
    },
    With {
        bindings: Vec<(Target, Expression)>,
        body: Vec<Statement>,
    },
    Macro(Arc<Macro>),
    /// `{% call %}`: the body as the macro `caller`, and the call it is handed to.
    Call {
        caller: Arc<Macro>,
        callee: Expression,
        arguments: Arguments,
    },
    Filter {
        filters: Vec<Link>,
        body: Vec<Statement>,
    },
    /// A body in a scope of its own.
    Scope(Vec<Statement>),
    Break,
    Continue,
}

#[derive(Debug)]
pub(super) struct For {
    pub(super) target: Target,
    pub(super) items: Expression,
    pub(super) condition: Option<Expression>,
    pub(super) recursive: bool,
    pub(super) body: Arc<Vec<Statement>>,
    pub(super) otherwise: Vec<Statement>,
}

/// What is assigned to.
#[derive(Clone, Debug)]
pub(super) enum Target {
    Name(Arc<str>),
    Attribute(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Debug)]
pub(super) struct Macro {
    pub(super) name: Arc<str>,
    /// Names, and what they are where the caller says nothing.
    pub(super) parameters: Vec<(Arc<str>, Option<Expression>)>,
    pub(super) body: Vec<Statement>,
    pub(super) takes_more: bool,
    pub(super) takes_named: bool,
    pub(super) takes_caller: bool,
}

#[derive(Debug, Default)]
pub(super) struct Arguments {
    pub(super) positional: Vec<Expression>,
    pub(super) named: Vec<(Arc<str>, Expression)>,
    pub(super) more: Option<Box<Expression>>,
    pub(super) more_named: Option<Box<Expression>>,
}

#[derive(Debug)]
pub(super) enum Expression {
    None,
    Bool(bool),
    Integer(i128),
    Float(f64),
    Text(Arc<str>),
    Name(Arc<str>),
    List(Vec<Expression>),
    Tuple(Vec<Expression>),
    Dictionary(Vec<(Expression, Expression)>),
    /// A value and what is done to it, first to last.
    Chain(Box<Expression>, Vec<Link>),
    Not(Box<Expression>),
    Negative(Box<Expression>),
    Positive(Box<Expression>),
    And(Vec<Expression>),
    Or(Vec<Expression>),
    Concatenation(Vec<Expression>),
    Arithmetic(Box<Expression>, Vec<(Operator, Expression)>),
    Comparison(Box<Expression>, Vec<(Comparator, Expression)>),
    Conditional(Box<Conditional>),
}

#[derive(Debug)]
pub(super) struct Conditional {
    pub(super) test: Expression,
    pub(super) then: Expression,
    pub(super) otherwise: Option<Expression>,
}

#[derive(Debug)]
pub(super) enum Link {
    Attribute(Arc<str>),
    Item(Expression),
    Slice(Box<[Option<Expression>; 3]>),
    Call(Arguments),
    Filter(Arc<str>, Arguments),
    Test { name: Arc<str>, arguments: Arguments, negated: bool },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Add,
    Subtract,
    Multiply,
    Divide,
    FloorDivide,
    Remainder,
    Power,
}

impl Operator {
    pub(super) fn symbol(self) -> &'static str {
        match self {
            Self::Add => "+",
            Self::Subtract => "-",
            Self::Multiply => "*",
            Self::Divide => "/",
            Self::FloorDivide => "//",
            Self::Remainder => "%",
            Self::Power => "**",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Comparator {
    Equal,
    NotEqual,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
    In,
    NotIn,
}
