//! Runs statements: scopes, namespaces, loops, assignments.

use super::Error;
use super::ast::{For, Link, Statement, StatementKind, Target};
use super::budget::{Budget, STEP};
use super::value::{Function, Loop, MacroValue, Recursion, Value};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

const GLOBALS: [(&str, Function); 7] = [
    ("range", Function::Range),
    ("dict", Function::Dict),
    ("namespace", Function::Namespace),
    ("cycler", Function::Cycler),
    ("joiner", Function::Joiner),
    ("raise_exception", Function::RaiseException),
    ("strftime_now", Function::StrftimeNow),
];

/// One run of a template.
pub(super) struct Machine {
    pub(super) budget: Budget,
    scopes: RefCell<Vec<Scope>>,
    namespaces: RefCell<Vec<Vec<(Value, Value)>>>,
}

struct Scope {
    outer: Option<usize>,
    variables: Vec<(Arc<str>, Value)>,
    /// A macro may still need it.
    kept: bool,
}

/// What follows a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

impl Machine {
    pub(super) fn new(variables: Vec<(Arc<str>, Value)>, budget: Budget) -> Self {
        let globals = GLOBALS.map(|(name, function)| (name.into(), Value::Function(function)));
        let globals = Scope { outer: None, variables: globals.to_vec(), kept: true };
        let given = Scope { outer: Some(0), variables, kept: true };
        Self { budget, scopes: RefCell::new(vec![globals, given]), namespaces: RefCell::default() }
    }

    pub(super) fn run(&self, body: &[Statement]) -> Result<String, Error> {
        self.captured(body, 1)
    }

    /// A new scope in another.
    pub(super) fn open_scope(&self, outer: usize) -> Result<usize, Error> {
        self.budget.spend(STEP)?;
        let mut scopes = self.scopes.borrow_mut();
        scopes.push(Scope { outer: Some(outer), variables: Vec::new(), kept: false });
        Ok(scopes.len() - 1)
    }

    /// Forgets a scope, and all inside it, unless a macro was defined there.
    pub(super) fn close_scope(&self, scope: usize) {
        let mut scopes = self.scopes.borrow_mut();
        while scopes.len() > scope && scopes.last().is_some_and(|last| !last.kept) {
            scopes.pop();
        }
    }

    /// Keeps a scope and those around it.
    fn keep_scope(&self, scope: usize) {
        let mut scopes = self.scopes.borrow_mut();
        let mut next = Some(scope);
        while let Some(scope) = next {
            if scopes[scope].kept {
                return;
            }
            scopes[scope].kept = true;
            next = scopes[scope].outer;
        }
    }

    pub(super) fn lookup(&self, name: &str, scope: usize) -> Result<Value, Error> {
        let scopes = self.scopes.borrow();
        let mut next = Some(scope);
        while let Some(scope) = next {
            let scope = &scopes[scope];
            self.budget.spend_times(1 + scope.variables.len(), 4)?;
            if let Some((_, value)) = scope.variables.iter().find(|(own, _)| &**own == name) {
                return Ok(value.clone());
            }
            next = scope.outer;
        }
        Ok(Value::undefined(format!("'{name}' is undefined")))
    }

    pub(super) fn define(&self, name: &Arc<str>, value: Value, scope: usize) -> Result<(), Error> {
        let mut scopes = self.scopes.borrow_mut();
        let variables = &mut scopes[scope].variables;
        self.budget.spend_times(1 + variables.len(), 4)?;
        match variables.iter_mut().find(|(own, _)| own == name) {
            Some((_, own)) => *own = value,
            None => {
                self.budget.spend(2 * STEP)?;
                variables.push((Arc::clone(name), value));
            }
        }
        Ok(())
    }

    pub(super) fn new_namespace(&self, entries: Vec<(Value, Value)>) -> Result<Value, Error> {
        self.budget.spend(STEP)?;
        let mut namespaces = self.namespaces.borrow_mut();
        namespaces.push(entries);
        Ok(Value::Namespace(namespaces.len() - 1))
    }

    pub(super) fn namespace_entries(&self, number: usize) -> Result<Vec<(Value, Value)>, Error> {
        let namespaces = self.namespaces.borrow();
        self.budget.spend_times(namespaces[number].len(), 2 * STEP)?;
        Ok(namespaces[number].clone())
    }

    pub(super) fn namespace_get(&self, number: usize, key: &Value) -> Result<Option<Value>, Error> {
        self.entry(&self.namespaces.borrow()[number], key)
    }

    fn namespace_set(&self, number: usize, name: &Arc<str>, value: Value) -> Result<(), Error> {
        let key = Value::Text(Arc::clone(name));
        let mut namespaces = self.namespaces.borrow_mut();
        self.insert(&mut namespaces[number], key, value)
    }

    pub(super) fn execute(
        &self,
        body: &[Statement],
        scope: usize,
        out: &mut String,
    ) -> Result<Flow, Error> {
        self.budget.nested(|| {
            for statement in body {
                self.budget.spend(STEP)?;
                let flow = self
                    .statement(&statement.kind, scope, out)
                    .map_err(|error| error.at(statement.line))?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
            }
            Ok(Flow::Next)
        })
    }

    /// The text of a body in a scope of its own; a loop outside of it cannot be left from inside.
    pub(super) fn captured(&self, body: &[Statement], scope: usize) -> Result<String, Error> {
        let mut text = String::new();
        let inner = self.open_scope(scope)?;
        let flow = self.execute(body, inner, &mut text)?;
        self.close_scope(inner);
        match flow {
            Flow::Next => Ok(text),
            _ => Err(Error::failed("`break` or `continue` outside of a loop")),
        }
    }

    fn statement(
        &self,
        statement: &StatementKind,
        scope: usize,
        out: &mut String,
    ) -> Result<Flow, Error> {
        match statement {
            StatementKind::Text(text) => {
                self.budget.spend(text.len())?;
                out.push_str(text);
            }
            StatementKind::Print(values) => {
                for value in values {
                    self.write(&self.evaluate(value, scope)?, out)?;
                }
            }
            StatementKind::If { branches, otherwise } => {
                for (test, body) in branches {
                    if self.evaluate(test, scope)?.is_true() {
                        return self.execute(body, scope, out);
                    }
                }
                return self.execute(otherwise, scope, out);
            }
            StatementKind::For(statement) => return self.for_statement(statement, scope, out),
            StatementKind::Set { target, value } => {
                let value = self.evaluate(value, scope)?;
                self.assign(target, value, scope)?;
            }
            StatementKind::SetBlock { target, filters, body } => {
                let value = self.filtered(filters, body, scope)?;
                self.assign(target, value, scope)?;
            }
            StatementKind::Filter { filters, body } => {
                self.write(&self.filtered(filters, body, scope)?, out)?;
            }
            StatementKind::With { bindings, body } => {
                let inner = self.open_scope(scope)?;
                for (target, value) in bindings {
                    // Python's order: no binding sees another.
                    let value = self.evaluate(value, scope)?;
                    self.assign(target, value, inner)?;
                }
                let flow = self.execute(body, inner, out)?;
                self.close_scope(inner);
                return Ok(flow);
            }
            StatementKind::Macro(definition) => {
                self.keep_scope(scope);
                let value = MacroValue { definition: Arc::clone(definition), scope };
                self.define(&definition.name, Value::Macro(Rc::new(value)), scope)?;
            }
            StatementKind::Call { caller, callee, arguments } => {
                self.keep_scope(scope);
                let caller = MacroValue { definition: Arc::clone(caller), scope };
                let callee = self.evaluate(callee, scope)?;
                let mut arguments = self.arguments(arguments, scope)?;
                arguments.named.push(("caller".into(), Value::Macro(Rc::new(caller))));
                self.write(&self.call(&callee, arguments)?, out)?;
            }
            StatementKind::Scope(body) => {
                let text = self.captured(body, scope)?;
                out.push_str(&text);
            }
            StatementKind::Break => return Ok(Flow::Break),
            StatementKind::Continue => return Ok(Flow::Continue),
        }
        Ok(Flow::Next)
    }

    fn filtered(&self, filters: &[Link], body: &[Statement], scope: usize) -> Result<Value, Error> {
        let mut value = Value::text(self.captured(body, scope)?);
        for filter in filters {
            value = self.link(value, filter, scope)?;
        }
        Ok(value)
    }

    pub(super) fn assign(&self, target: &Target, value: Value, scope: usize) -> Result<(), Error> {
        match target {
            Target::Name(name) => self.define(name, value, scope),
            Target::Attribute(name, attribute) => match self.lookup(name, scope)? {
                Value::Namespace(number) => self.namespace_set(number, attribute, value),
                Value::Undefined(reason) => Err(Error::failed(&*reason)),
                _ => Err(Error::failed("cannot assign attribute on non-namespace object")),
            },
            Target::Tuple(targets) => {
                let items = self.items(&value)?;
                if items.len() != targets.len() {
                    let (wanted, found) = (targets.len(), items.len());
                    let message = format!("{found} values for {wanted} names");
                    return Err(Error::failed(message));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item, scope)?;
                }
                Ok(())
            }
        }
    }

    fn for_statement(
        &self,
        statement: &For,
        scope: usize,
        out: &mut String,
    ) -> Result<Flow, Error> {
        let mut items = self.items(&self.evaluate(&statement.items, scope)?)?;
        if let Some(condition) = &statement.condition {
            let mut kept = Vec::new();
            for item in items {
                let inner = self.open_scope(scope)?;
                self.assign(&statement.target, item.clone(), inner)?;
                if self.evaluate(condition, inner)?.is_true() {
                    kept.push(item);
                }
                self.close_scope(inner);
            }
            items = kept;
        }
        if items.is_empty() {
            return self.execute(&statement.otherwise, scope, out);
        }
        let recursion = statement.recursive.then(|| Recursion {
            target: statement.target.clone(),
            body: Arc::clone(&statement.body),
            scope,
        });
        if statement.recursive {
            self.keep_scope(scope);
        }
        let state = Rc::new(Loop::new(items, 1, recursion)?);
        self.iterate(&state, &statement.target, &statement.body, scope, out)?;
        Ok(Flow::Next)
    }

    /// Runs a loop's body for each of its items.
    pub(super) fn iterate(
        &self,
        state: &Rc<Loop>,
        target: &Target,
        body: &[Statement],
        scope: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        let name: Arc<str> = "loop".into();
        for (index, item) in state.items.iter().enumerate() {
            state.index.set(index);
            let inner = self.open_scope(scope)?;
            self.define(&name, Value::Loop(Rc::clone(state)), inner)?;
            self.assign(target, item.clone(), inner)?;
            let flow = self.execute(body, inner, out)?;
            self.close_scope(inner);
            if flow == Flow::Break {
                break;
            }
        }
        Ok(())
    }
}
