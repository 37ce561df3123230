//! Python's methods of `str`.

use super::Error;
use super::budget::STEP;
use super::calls::{Given, required};
use super::machine::Machine;
use super::text::is_space;
use super::value::Value;
use std::sync::Arc;

impl Machine {
    pub(super) fn text_method(
        &self,
        text: &Arc<str>,
        name: &str,
        given: Given,
    ) -> Result<Value, Error> {
        // Case mappings make up to three characters of one.
        self.budget.spend_times(text.len(), 3)?;
        match name {
            "split" | "rsplit" => return self.split(text, name, given),
            "strip" | "lstrip" | "rstrip" => return self.strip(text, name, given),
            "replace" => return self.replace(text, given),
            "format" => return self.str_format(text, given).map(Value::text),
            "find" | "rfind" | "index" | "rindex" | "count" => {
                return self.find(text, name, given);
            }
            "startswith" | "endswith" => return self.starts(text, name, given),
            "center" | "ljust" | "rjust" => return self.justify(text, name, given),
            _ => {}
        }
        match name {
            "join" => {
                let [items] = given.bind(name, ["iterable"])?;
                let items = self.items(&required(items, name, "iterable")?)?;
                let mut joined = String::new();
                for (index, item) in items.iter().enumerate() {
                    let item = self.expect_text(item, &format!("join: item {index}"))?;
                    self.budget.spend(text.len() + item.len())?;
                    joined.push_str(if index > 0 { text } else { "" });
                    joined.push_str(&item);
                }
                Ok(Value::text(joined))
            }
            "partition" | "rpartition" => {
                let [separator] = given.bind(name, ["sep"])?;
                let separator = self.separator(required(separator, name, "sep")?)?;
                let found = match name {
                    "partition" => text.split_once(&*separator),
                    _ => text.rsplit_once(&*separator),
                };
                let parts = match (found, name) {
                    (Some((before, after)), _) => [before, &*separator, after],
                    (None, "partition") => [text, "", ""],
                    (None, _) => ["", "", text],
                };
                Value::tuple(parts.map(Value::text).to_vec())
            }
            "removeprefix" | "removesuffix" => {
                let [affix] = given.bind(name, ["affix"])?;
                let affix = self.expect_text(&required(affix, name, "affix")?, name)?;
                let rest = match name {
                    "removeprefix" => text.strip_prefix(&*affix),
                    _ => text.strip_suffix(&*affix),
                };
                Ok(rest.map_or_else(|| Value::Text(Arc::clone(text)), Value::text))
            }
            "splitlines" => {
                let [keep] = given.bind(name, ["keepends"])?;
                self.text_list(split_lines(text, keep.is_some_and(|keep| keep.is_true())))
            }
            "expandtabs" => {
                let [size] = given.bind(name, ["tabsize"])?;
                let size = size.map_or(Ok(8), |size| self.expect_integer(&size, name))?;
                self.expand_tabs(text, usize::try_from(size).unwrap_or(0)).map(Value::text)
            }
            "zfill" => {
                let [width] = given.bind(name, ["width"])?;
                let width = self.expect_integer(&required(width, name, "width")?, name)?;
                let missing = self.missing_width(text, width)?;
                let (sign, digits) = match text.starts_with(['+', '-']) {
                    true => text.split_at(1),
                    false => ("", &**text),
                };
                Ok(Value::text([sign, &"0".repeat(missing), digits].concat()))
            }
            _ => {
                let [] = given.bind(name, [])?;
                Ok(plain(text, name))
            }
        }
    }

    fn text_list<'a>(&self, parts: impl IntoIterator<Item = &'a str>) -> Result<Value, Error> {
        let mut items = Vec::new();
        for part in parts {
            self.budget.spend(STEP)?;
            items.push(Value::text(part));
        }
        Value::list(items)
    }

    fn separator(&self, value: Value) -> Result<Arc<str>, Error> {
        let separator = self.expect_text(&value, "a separator")?;
        match separator.is_empty() {
            true => Err(Error::failed("empty separator")),
            false => Ok(separator),
        }
    }

    fn split(&self, text: &str, name: &str, given: Given) -> Result<Value, Error> {
        let [separator, most] = given.bind(name, ["sep", "maxsplit"])?;
        let most = most.map_or(Ok(-1), |most| self.expect_integer(&most, name))?;
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let from_right = name == "rsplit";
        let separator = match separator {
            None | Some(Value::None) => {
                let parts = words(text, most, from_right);
                return self.text_list(parts);
            }
            Some(separator) => self.separator(separator)?,
        };
        let pieces = most.saturating_add(1);
        if from_right {
            let mut parts: Vec<&str> = Vec::new();
            for part in text.rsplitn(pieces, &*separator) {
                self.budget.spend(STEP)?;
                parts.push(part);
            }
            parts.reverse();
            return self.text_list(parts);
        }
        self.text_list(text.splitn(pieces, &*separator))
    }

    fn strip(&self, text: &str, name: &str, given: Given) -> Result<Value, Error> {
        let [characters] = given.bind(name, ["chars"])?;
        let set: Option<Vec<char>> = match characters {
            None | Some(Value::None) => None,
            Some(value) => Some(self.expect_text(&value, name)?.chars().collect()),
        };
        self.budget.spend_times(text.len(), set.as_ref().map_or(0, Vec::len))?;
        let strips = |character: char| match &set {
            None => is_space(character),
            Some(set) => set.contains(&character),
        };
        let mut stripped = text;
        if name != "rstrip" {
            stripped = stripped.trim_start_matches(strips);
        }
        if name != "lstrip" {
            stripped = stripped.trim_end_matches(strips);
        }
        Ok(Value::text(stripped))
    }

    fn replace(&self, text: &str, given: Given) -> Result<Value, Error> {
        let [old, new, count] = given.bind("replace", ["old", "new", "count"])?;
        let old = self.expect_text(&required(old, "replace", "old")?, "replace")?;
        let new = self.expect_text(&required(new, "replace", "new")?, "replace")?;
        let count = count.map_or(Ok(-1), |count| self.expect_integer(&count, "replace"))?;
        self.replaced(text, &old, &new, count).map(Value::text)
    }

    /// A text with the first `count` occurrences replaced; all of them where it is negative.
    pub(super) fn replaced(
        &self,
        text: &str,
        old: &str,
        new: &str,
        count: i128,
    ) -> Result<String, Error> {
        self.budget.spend(text.len())?;
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        let occurrences = text.matches(old).count().min(count);
        self.budget.spend(text.len())?;
        self.budget.spend_times(occurrences, new.len())?;
        Ok(text.replacen(old, new, count))
    }

    fn find(&self, text: &str, name: &str, given: Given) -> Result<Value, Error> {
        let [wanted, start, end] = given.bind(name, ["sub", "start", "end"])?;
        let wanted = self.expect_text(&required(wanted, name, "sub")?, name)?;
        let length = text.chars().count() as i128;
        let bound = |value: Option<Value>, otherwise: i128| match value {
            None | Some(Value::None) => Ok(otherwise),
            Some(value) => {
                let bound = self.expect_integer(&value, name)?;
                let bound = if bound < 0 { bound.saturating_add(length) } else { bound };
                Ok::<_, Error>(bound.max(0))
            }
        };
        let (start, end) = (bound(start, 0)?, bound(end, length)?.min(length));
        let none = || match name {
            "count" => Ok(Value::Integer(0)),
            "index" | "rindex" => Err(Error::failed("substring not found")),
            _ => Ok(Value::Integer(-1)),
        };
        if start > end {
            return none();
        }
        let byte = |index: i128| {
            text.char_indices().nth(index as usize).map_or(text.len(), |(byte, _)| byte)
        };
        let part = &text[byte(start)..byte(end)];
        let found = match name {
            "count" => return Ok(Value::Integer(part.matches(&*wanted).count() as i128)),
            "find" | "index" => part.find(&*wanted),
            _ => part.rfind(&*wanted),
        };
        match found {
            Some(byte) => Ok(Value::Integer(start + part[..byte].chars().count() as i128)),
            None => none(),
        }
    }

    fn starts(&self, text: &str, name: &str, given: Given) -> Result<Value, Error> {
        let [affix] = given.bind(name, ["prefix"])?;
        let affix = required(affix, name, "prefix")?;
        let affixes = match &affix {
            Value::Sequence(_) => self.items(&affix)?,
            _ => vec![affix],
        };
        for affix in affixes {
            let affix = self.expect_text(&affix, name)?;
            let found = match name {
                "startswith" => text.starts_with(&*affix),
                _ => text.ends_with(&*affix),
            };
            if found {
                return Ok(Value::Bool(true));
            }
        }
        Ok(Value::Bool(false))
    }

    /// How many characters are missing to a width, paid for.
    pub(super) fn missing_width(&self, text: &str, width: i128) -> Result<usize, Error> {
        let missing = width - text.chars().count() as i128;
        let missing = usize::try_from(missing.max(0)).unwrap_or(usize::MAX);
        self.budget.spend(missing)?;
        Ok(missing)
    }

    fn justify(&self, text: &str, name: &str, given: Given) -> Result<Value, Error> {
        let [width, fill] = given.bind(name, ["width", "fillchar"])?;
        let width = self.expect_integer(&required(width, name, "width")?, name)?;
        let fill = match fill {
            Some(fill) => self.expect_text(&fill, name)?,
            None => " ".into(),
        };
        let mut characters = fill.chars();
        let (Some(fill), None) = (characters.next(), characters.next()) else {
            return Err(Error::failed("The fill character must be exactly one character long"));
        };
        let missing = self.missing_width(text, width)?;
        self.budget.spend_times(missing, fill.len_utf8())?;
        let left = match name {
            "ljust" => 0,
            "rjust" => missing,
            // Python's own rounding: an odd rest goes left where the width is odd.
            _ => missing / 2 + (missing & width as usize & 1),
        };
        let pad = |count: usize| fill.to_string().repeat(count);
        Ok(Value::text([&pad(left), text, &pad(missing - left)].concat()))
    }

    fn expand_tabs(&self, text: &str, size: usize) -> Result<String, Error> {
        let mut expanded = String::new();
        let mut column = 0;
        for character in text.chars() {
            match character {
                '\t' => {
                    let spaces = if size == 0 { 0 } else { size - column % size };
                    self.budget.spend(spaces)?;
                    expanded.extend(std::iter::repeat_n(' ', spaces));
                    column += spaces;
                }
                '\n' | '\r' => {
                    expanded.push(character);
                    column = 0;
                }
                other => {
                    expanded.push(other);
                    column += 1;
                }
            }
        }
        Ok(expanded)
    }
}

/// Words between white space: at most `most` cuts, from the left or the right.
fn words(text: &str, most: usize, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text;
    loop {
        rest = match from_right {
            true => rest.trim_end_matches(is_space),
            false => rest.trim_start_matches(is_space),
        };
        if rest.is_empty() {
            break;
        }
        let cut = match from_right {
            true => rest.char_indices().rev().find(|(_, it)| is_space(*it)),
            false => rest.char_indices().find(|(_, it)| is_space(*it)),
        };
        let Some((at, space)) = cut.filter(|_| parts.len() < most) else {
            parts.push(match from_right {
                true => rest.trim_start_matches(is_space_if(cut.is_none())),
                false => rest.trim_end_matches(is_space_if(cut.is_none())),
            });
            break;
        };
        let after = at + space.len_utf8();
        let (part, left) = match from_right {
            true => (&rest[after..], &rest[..at]),
            false => (&rest[..at], &rest[after..]),
        };
        parts.push(part);
        rest = left;
    }
    if from_right {
        parts.reverse();
    }
    parts
}

/// The last part of a limited split keeps the white space at its far end.
fn is_space_if(strips: bool) -> impl Fn(char) -> bool {
    move |character| strips && is_space(character)
}

/// Lines as Python's `splitlines` cuts them.
pub(super) fn split_lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let is_break = |it: char| {
        matches!(
            it,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some((at, found)) = rest.char_indices().find(|(_, it)| is_break(*it)) {
        let mut end = at + found.len_utf8();
        if rest[at..].starts_with("\r\n") {
            end = at + 2;
        }
        lines.push(&rest[..if keep_ends { end } else { at }]);
        rest = &rest[end..];
    }
    if !rest.is_empty() {
        lines.push(rest);
    }
    lines
}

/// Methods without arguments.
fn plain(text: &str, name: &str) -> Value {
    let has_case = |it: char| it.is_uppercase() || it.is_lowercase();
    let all = |test: fn(char) -> bool| Value::Bool(!text.is_empty() && text.chars().all(test));
    match name {
        "upper" => Value::text(text.to_uppercase()),
        "lower" => Value::text(text.to_lowercase()),
        "casefold" => Value::text(text.to_lowercase().replace('ß', "ss")),
        "capitalize" => Value::text(capitalized(text)),
        "title" => Value::text(titled(text)),
        "swapcase" => Value::text(text.chars().fold(String::new(), |mut swapped, it| {
            match it.is_uppercase() {
                true => swapped.extend(it.to_lowercase()),
                false => swapped.extend(it.to_uppercase()),
            }
            swapped
        })),
        "islower" => {
            Value::Bool(text.chars().any(has_case) && !text.chars().any(char::is_uppercase))
        }
        "isupper" => {
            Value::Bool(text.chars().any(has_case) && !text.chars().any(char::is_lowercase))
        }
        "istitle" => Value::Bool(text.chars().any(has_case) && titled(text) == text),
        "isspace" => all(is_space),
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isdecimal" | "isdigit" | "isnumeric" => all(char::is_numeric),
        "isascii" => Value::Bool(text.is_ascii()),
        "isprintable" => {
            Value::Bool(!text.chars().any(|it| it.is_control() || (is_space(it) && it != ' ')))
        }
        _ => {
            let starts = text.starts_with(|it: char| it == '_' || it.is_alphabetic());
            Value::Bool(starts && text.chars().all(|it| it == '_' || it.is_alphanumeric()))
        }
    }
}

pub(super) fn capitalized(text: &str) -> String {
    let mut characters = text.chars();
    let first = characters.next().into_iter().flat_map(char::to_uppercase);
    first.chain(characters.as_str().to_lowercase().chars()).collect()
}

fn titled(text: &str) -> String {
    let mut titled = String::with_capacity(text.len());
    let mut inside = false;
    for character in text.chars() {
        match inside {
            true => titled.extend(character.to_lowercase()),
            false => titled.extend(character.to_uppercase()),
        }
        inside = character.is_uppercase() || character.is_lowercase();
    }
    titled
}
