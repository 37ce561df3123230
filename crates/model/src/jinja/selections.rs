//! Jinja2's filters on many items: picking, ordering, joining, grouping.

use super::Error;
use super::budget::STEP;
use super::calls::{Given, required};
use super::machine::Machine;
use super::value::{SequenceKind, Value};
use std::cmp::Ordering;
use std::sync::Arc;

impl Machine {
    pub(super) fn selection(
        &self,
        name: &str,
        value: &Value,
        given: Given,
    ) -> Result<Value, Error> {
        match name {
            // Jinja2 does not iterate over what is false, so `none` passes.
            "map" | "select" | "reject" | "selectattr" | "rejectattr" if !value.is_true() => {
                Value::stream(Vec::new())
            }
            "map" => self.map(value, given),
            "select" | "reject" | "selectattr" | "rejectattr" => self.select(name, value, given),
            "first" | "last" => {
                let [] = given.bind(name, [])?;
                let item = match (name, value) {
                    ("first", Value::Stream(stream)) => stream.next(),
                    ("last", Value::Stream(_)) => {
                        return Err(Error::failed("'generator' object is not reversible"));
                    }
                    ("first", value) => self.items(value)?.into_iter().next(),
                    (_, value) => self.items(value)?.pop(),
                };
                let none = || Value::undefined(format!("No {name} item, sequence was empty."));
                Ok(item.unwrap_or_else(none))
            }
            "reverse" => {
                let [] = given.bind(name, [])?;
                if let Value::Text(text) = value {
                    self.budget.spend(text.len())?;
                    return Ok(Value::text(text.chars().rev().collect::<String>()));
                }
                let mut items = self.items(value)?;
                items.reverse();
                Value::stream(items)
            }
            "join" => self.join(value, given),
            "sort" => {
                let names = ["reverse", "case_sensitive", "attribute"];
                let [reverse, case, attribute] = given.bind(name, names)?;
                let items = self.items(value)?;
                let items = match attribute.as_ref().and_then(Value::as_text) {
                    Some(names) => self.keyed_by_all(items, names, is_set(case))?,
                    None => self.keyed(items, attribute, None, is_set(case))?,
                };
                let sorted = self.sorted(items, is_set(reverse))?;
                Value::list(sorted.into_iter().map(|(_, item)| item).collect())
            }
            "unique" => {
                let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"])?;
                let items = self.keyed(self.items(value)?, attribute, None, is_set(case))?;
                let mut seen: Vec<(Value, Value)> = Vec::new();
                for (key, item) in items {
                    if self.entry(&seen, &key)?.is_none() {
                        seen.push((key, item));
                    }
                }
                Value::stream(seen.into_iter().map(|(_, item)| item).collect())
            }
            "min" | "max" => {
                let [case, attribute] = given.bind(name, ["case_sensitive", "attribute"])?;
                let items = self.keyed(self.items(value)?, attribute, None, is_set(case))?;
                let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
                let mut best: Option<(Value, Value)> = None;
                for item in items {
                    let better = match &best {
                        Some(best) => self.order(&item.0, &best.0)? == Some(wanted),
                        None => true,
                    };
                    if better {
                        best = Some(item);
                    }
                }
                let none = || Value::undefined("No aggregated item, sequence was empty.");
                Ok(best.map_or_else(none, |(_, item)| item))
            }
            "sum" => {
                let [attribute, start] = given.bind(name, ["attribute", "start"])?;
                let mut sum = start.unwrap_or(Value::Integer(0));
                for (key, _) in self.keyed(self.items(value)?, attribute, None, true)? {
                    sum = self.plus(&sum, &key)?;
                }
                Ok(sum)
            }
            "groupby" => self.group(value, given),
            "dictsort" => self.dictsort(value, given),
            "batch" => self.batch(value, given),
            _ => self.slices(value, given),
        }
    }

    /// `item.a.0.b` for the attribute `a.0.b`.
    fn path(&self, item: &Value, attribute: &Value) -> Result<Value, Error> {
        let Some(path) = attribute.as_text() else { return self.item(item, attribute) };
        let mut value = item.clone();
        for part in path.split('.') {
            let number =
                part.parse::<u32>().ok().filter(|_| part.bytes().all(|it| it.is_ascii_digit()));
            let key = number.map_or_else(|| Value::text(part), |it| Value::Integer(it.into()));
            value = self.item(&value, &key)?;
        }
        Ok(value)
    }

    /// Items behind what they are compared by.
    fn keyed(
        &self,
        items: Vec<Value>,
        attribute: Option<Value>,
        default: Option<&Value>,
        case_sensitive: bool,
    ) -> Result<Vec<(Value, Value)>, Error> {
        let attribute = attribute.filter(|it| !matches!(it, Value::None));
        self.budget.spend_times(items.len(), 2 * STEP)?;
        let mut keyed = Vec::with_capacity(items.len());
        for item in items {
            let mut key = match &attribute {
                Some(attribute) => self.path(&item, attribute)?,
                None => item.clone(),
            };
            if let (Value::Undefined(_), Some(default)) = (&key, default) {
                key = default.clone();
            }
            if let Value::Text(text) = &key
                && !case_sensitive
            {
                self.budget.spend(text.len())?;
                key = Value::text(text.to_lowercase());
            }
            keyed.push((key, item));
        }
        Ok(keyed)
    }

    /// Items behind lists of what they are compared by: `a,b` is by `a`, then by `b`.
    fn keyed_by_all(
        &self,
        items: Vec<Value>,
        names: &str,
        case_sensitive: bool,
    ) -> Result<Vec<(Value, Value)>, Error> {
        let mut all = Vec::with_capacity(items.len());
        for item in items {
            let mut keys = Vec::new();
            for name in names.split(',') {
                let keyed =
                    self.keyed(vec![item.clone()], Some(Value::text(name)), None, case_sensitive)?;
                keys.extend(keyed.into_iter().map(|(key, _)| key));
            }
            all.push((Value::list(keys)?, item));
        }
        Ok(all)
    }

    /// A stable sort by keys that may have no order. (Rust's own sort may panic without one.)
    fn sorted(
        &self,
        mut items: Vec<(Value, Value)>,
        reverse: bool,
    ) -> Result<Vec<(Value, Value)>, Error> {
        if items.len() < 2 {
            return Ok(items);
        }
        let first = if reverse { Ordering::Greater } else { Ordering::Less };
        let right = items.split_off(items.len() / 2);
        let left = self.budget.nested(|| self.sorted(items, reverse))?;
        let right = self.budget.nested(|| self.sorted(right, reverse))?;
        let mut merged = Vec::with_capacity(left.len() + right.len());
        let (mut left, mut right) = (left.into_iter().peekable(), right.into_iter().peekable());
        while let (Some(a), Some(b)) = (left.peek(), right.peek()) {
            let takes_right = self.order(&b.0, &a.0)? == Some(first);
            merged.extend(if takes_right { right.next() } else { left.next() });
        }
        merged.extend(left);
        merged.extend(right);
        Ok(merged)
    }

    fn map(&self, value: &Value, mut given: Given) -> Result<Value, Error> {
        let items = self.items(value)?;
        if given.positional.is_empty() {
            let [attribute, default] = given.bind("map", ["attribute", "default"])?;
            let attribute = required(attribute, "map", "attribute")?;
            let mut mapped = Vec::with_capacity(items.len());
            for item in items {
                let found = self.path(&item, &attribute)?;
                mapped.push(match (&found, &default) {
                    (Value::Undefined(_), Some(default)) => default.clone(),
                    _ => found,
                });
            }
            return Value::stream(mapped);
        }
        let name = self.expect_text(&given.positional.remove(0), "map: the filter")?;
        let mut mapped = Vec::with_capacity(items.len());
        for item in items {
            let given = self.copied(&given)?;
            mapped.push(self.budget.nested(|| self.filter(&name, item, given))?);
        }
        Value::stream(mapped)
    }

    fn copied(&self, given: &Given) -> Result<Given, Error> {
        self.budget.spend_times(given.positional.len() + given.named.len(), STEP)?;
        Ok(Given { positional: given.positional.clone(), named: given.named.clone() })
    }

    fn select(&self, name: &str, value: &Value, mut given: Given) -> Result<Value, Error> {
        let attribute = match name.ends_with("attr") {
            true if given.positional.is_empty() => {
                return Err(Error::failed("Missing parameter for attribute name"));
            }
            true => Some(given.positional.remove(0)),
            false => None,
        };
        let test: Option<Arc<str>> = match given.positional.is_empty() {
            true => None,
            false => Some(self.expect_text(&given.positional.remove(0), "the test")?),
        };
        let wanted = name.starts_with("select");
        let mut kept = Vec::new();
        for item in self.items(value)? {
            let subject = match &attribute {
                Some(attribute) => self.path(&item, attribute)?,
                None => item.clone(),
            };
            let passes = match &test {
                Some(test) => self.test(test, &subject, self.copied(&given)?)?,
                None => subject.is_true(),
            };
            if passes == wanted {
                kept.push(item);
            }
        }
        Value::stream(kept)
    }

    fn join(&self, value: &Value, given: Given) -> Result<Value, Error> {
        let [separator, attribute] = given.bind("join", ["d", "attribute"])?;
        let separator = separator.map_or(Ok(String::new()), |it| self.to_text(&it))?;
        let items = self.keyed(self.items(value)?, attribute, None, true)?;
        let mut joined = String::new();
        for (index, (item, _)) in items.iter().enumerate() {
            if index > 0 {
                self.budget.spend(separator.len())?;
                joined.push_str(&separator);
            }
            self.write(item, &mut joined)?;
        }
        Ok(Value::text(joined))
    }

    fn group(&self, value: &Value, given: Given) -> Result<Value, Error> {
        let names = ["attribute", "default", "case_sensitive"];
        let [attribute, default, case] = given.bind("groupby", names)?;
        let attribute = required(attribute, "groupby", "attribute")?;
        let case = is_set(case);
        let items = self.items(value)?;
        let items = self.keyed(items, Some(attribute.clone()), default.as_ref(), case)?;
        let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
        for (key, item) in self.sorted(items, false)? {
            match groups.last_mut() {
                Some((last, items)) if self.equal(last, &key)? => items.push(item),
                _ => groups.push((key, vec![item])),
            }
        }
        let mut tuples = Vec::with_capacity(groups.len());
        for (key, items) in groups {
            // The group is named as its first item spells it.
            let key = match (case, self.path(&items[0], &attribute)?) {
                (true, _) | (false, Value::Undefined(_)) => key,
                (false, own) => own,
            };
            tuples.push(Value::tuple(vec![key, Value::list(items)?])?);
        }
        Value::list(tuples)
    }

    fn dictsort(&self, value: &Value, given: Given) -> Result<Value, Error> {
        let names = ["case_sensitive", "by", "reverse"];
        let [case, by, reverse] = given.bind("dictsort", names)?;
        let Value::Dictionary(dictionary) = value else {
            return Err(Error::failed("dictsort takes a dictionary"));
        };
        let by = by.map_or(Ok("key".into()), |by| self.expect_text(&by, "dictsort: by"))?;
        let index = match &*by {
            "key" => 0,
            "value" => 1,
            _ => {
                return Err(Error::failed("You can only sort by either \"key\" or \"value\""));
            }
        };
        let pairs = self.pairs(&dictionary.entries)?;
        let pairs = self.keyed(pairs, Some(Value::Integer(index)), None, is_set(case))?;
        let sorted = self.sorted(pairs, is_set(reverse))?;
        Value::list(sorted.into_iter().map(|(_, pair)| pair).collect())
    }

    fn batch(&self, value: &Value, given: Given) -> Result<Value, Error> {
        let [count, fill] = given.bind("batch", ["linecount", "fill_with"])?;
        let count = self.expect_integer(&required(count, "batch", "linecount")?, "batch")?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0);
        let count = count.ok_or_else(|| Error::failed("batch takes a positive count"))?;
        let items = self.items(value)?;
        let mut batches = Vec::new();
        for batch in items.chunks(count) {
            let mut batch = batch.to_vec();
            if let Some(fill) = fill.as_ref().filter(|it| !matches!(it, Value::None)) {
                self.budget.spend_times(count - batch.len(), STEP)?;
                batch.resize(count, fill.clone());
            }
            batches.push(Value::list(batch)?);
        }
        Value::stream(batches)
    }

    fn slices(&self, value: &Value, given: Given) -> Result<Value, Error> {
        let [count, fill] = given.bind("slice", ["slices", "fill_with"])?;
        let count = self.expect_integer(&required(count, "slice", "slices")?, "slice")?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0);
        let count = count.ok_or_else(|| Error::failed("slice takes a positive count"))?;
        self.budget.spend_times(count, STEP)?;
        let items = self.items(value)?;
        let (each, longer) = (items.len() / count, items.len() % count);
        let mut rest = items.into_iter();
        let mut slices = Vec::with_capacity(count);
        for index in 0..count {
            let mut part: Vec<Value> =
                rest.by_ref().take(each + usize::from(index < longer)).collect();
            if let Some(fill) = fill.as_ref().filter(|it| !matches!(it, Value::None))
                && index >= longer
            {
                part.push(fill.clone());
            }
            slices.push(Value::sequence(SequenceKind::List, part)?);
        }
        Value::stream(slices)
    }
}

fn is_set(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}
