//! `'{}'.format(x)` as Python does it, and how a number or a text is written to a width.

use super::Error;
use super::calls::Given;
use super::machine::Machine;
use super::operators::too_large;
use super::value::Value;

/// Digits after the point that anyone has asked for, and then some.
const PRECISION_MAX: usize = 500;

/// How one value is written.
#[derive(Clone, Debug, Default)]
pub(super) struct Spec {
    pub(super) fill: Option<char>,
    pub(super) align: Option<char>,
    pub(super) sign: Option<char>,
    pub(super) alternate: bool,
    pub(super) zero: bool,
    pub(super) width: usize,
    pub(super) grouping: Option<char>,
    pub(super) precision: Option<usize>,
    pub(super) kind: Option<char>,
}

impl Machine {
    /// `text.format(…)`.
    pub(super) fn str_format(&self, format: &str, given: Given) -> Result<String, Error> {
        let mut automatic = 0;
        self.format_fields(format, &given, &mut automatic, 0)
    }

    fn format_fields(
        &self,
        format: &str,
        given: &Given,
        automatic: &mut usize,
        depth: u32,
    ) -> Result<String, Error> {
        self.budget.spend(format.len())?;
        let mut out = String::new();
        let mut rest = format;
        while let Some(start) = rest.find(['{', '}']) {
            out.push_str(&rest[..start]);
            let brace = &rest[start..start + 1];
            rest = &rest[start + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                out.push_str(brace);
                rest = after;
                continue;
            }
            if brace == "}" {
                return Err(Error::failed("Single '}' encountered in format string"));
            }
            let end = field_end(rest)?;
            self.format_field(&rest[..end], given, automatic, depth, &mut out)?;
            rest = &rest[end + 1..];
        }
        out.push_str(rest);
        Ok(out)
    }

    fn format_field(
        &self,
        field: &str,
        given: &Given,
        automatic: &mut usize,
        depth: u32,
        out: &mut String,
    ) -> Result<(), Error> {
        if depth > 1 {
            return Err(Error::failed("Max string recursion exceeded"));
        }
        let split = field.find([':', '!']).unwrap_or(field.len());
        let (name, mut rest) = field.split_at(split);
        let value = self.format_value(name, given, automatic)?;
        let mut converted = None;
        if let Some(conversion) = rest.strip_prefix('!') {
            let mut text = String::new();
            match conversion.chars().next() {
                Some('s') => self.write(&value, &mut text)?,
                Some('r' | 'a') => self.write_repr(&value, 0, &mut text)?,
                _ => return Err(Error::failed("unknown conversion in format string")),
            }
            rest = &conversion[1..];
            converted = Some(Value::text(text));
        }
        let value = converted.unwrap_or(value);
        let spec = rest.strip_prefix(':').unwrap_or("");
        let spec = self.format_fields(spec, given, automatic, depth + 1)?;
        if spec.is_empty() {
            return self.write(&value, out);
        }
        let spec = read_spec(&spec)?;
        match &value {
            Value::Integer(_) | Value::Float(_) | Value::Bool(_) if spec.kind != Some('s') => {
                let value = match (&value, spec.kind) {
                    (Value::Bool(it), Some(_)) => Value::Integer(i128::from(*it)),
                    (Value::Bool(_), None) => Value::text(self.to_text(&value)?),
                    _ => value.clone(),
                };
                let align = spec.align.or(Some('>'));
                self.write_number(&value, Spec { align, ..spec }, out)
            }
            value => self.pad_text(&self.to_text(value)?, &spec, out),
        }
    }

    fn format_value(
        &self,
        name: &str,
        given: &Given,
        automatic: &mut usize,
    ) -> Result<Value, Error> {
        let first_end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut rest) = name.split_at(first_end);
        let index = match first.is_empty() {
            true => {
                *automatic += 1;
                Some(*automatic - 1)
            }
            false => first.parse().ok(),
        };
        let found = match index {
            Some(index) => given.positional.get(index),
            None => given.named.iter().find(|(own, _)| &**own == first).map(|(_, value)| value),
        };
        let missing = || Error::failed(format!("format: there is no argument '{first}'"));
        let mut value = found.cloned().ok_or_else(missing)?;
        while !rest.is_empty() {
            if let Some(after) = rest.strip_prefix('[') {
                let end =
                    after.find(']').ok_or_else(|| Error::failed("Missing ']' in format string"))?;
                let key = &after[..end];
                let key = key.parse().map_or_else(|_| Value::text(key), Value::Integer);
                value = self.item(&value, &key)?;
                rest = &after[end + 1..];
            } else {
                let after = rest.strip_prefix('.').unwrap_or(rest);
                let end = after.find(['.', '[']).unwrap_or(after.len());
                value = self.attribute(&value, &after[..end])?;
                rest = &after[end..];
            }
            if let Value::Undefined(reason) = &value {
                return Err(Error::failed(&**reason));
            }
        }
        Ok(value)
    }

    pub(super) fn pad_text(&self, text: &str, spec: &Spec, out: &mut String) -> Result<(), Error> {
        let cut = spec.precision.and_then(|most| text.char_indices().nth(most));
        let text = cut.map_or(text, |(end, _)| &text[..end]);
        let zero = spec.zero && spec.fill.is_none();
        let fill = spec.fill.unwrap_or(if zero { '0' } else { ' ' });
        self.pad("", text, fill, spec.align.unwrap_or('<'), spec.width, out)
    }

    /// Writes a sign or prefix and a body, filled up to a width.
    fn pad(
        &self,
        head: &str,
        body: &str,
        fill: char,
        align: char,
        width: usize,
        out: &mut String,
    ) -> Result<(), Error> {
        let length = head.chars().count() + body.chars().count();
        let missing = width.saturating_sub(length);
        self.budget.spend(missing.saturating_mul(fill.len_utf8()))?;
        self.budget.spend(head.len() + body.len())?;
        let (left, inside, right) = match align {
            '<' => (0, 0, missing),
            '^' => (missing / 2, 0, missing - missing / 2),
            '=' => (0, missing, 0),
            _ => (missing, 0, 0),
        };
        let fills = |count| std::iter::repeat_n(fill, count);
        out.extend(fills(left));
        out.push_str(head);
        out.extend(fills(inside));
        out.push_str(body);
        out.extend(fills(right));
        Ok(())
    }

    pub(super) fn write_number(
        &self,
        value: &Value,
        spec: Spec,
        out: &mut String,
    ) -> Result<(), Error> {
        if spec.precision.is_some_and(|precision| precision > PRECISION_MAX) {
            return Err(too_large());
        }
        let (negative, prefix, body) = match (value, spec.kind) {
            (Value::Text(text), _) => {
                return self.pad_text(text, &Spec { align: spec.align.or(Some('<')), ..spec }, out);
            }
            (Value::Integer(value), None | Some('d' | 'n' | 'x' | 'X' | 'o' | 'b' | 'c')) => {
                let size = value.unsigned_abs();
                let (prefix, body) = match spec.kind {
                    Some('x') => ("0x", format!("{size:x}")),
                    Some('X') => ("0X", format!("{size:X}")),
                    Some('o') => ("0o", format!("{size:o}")),
                    Some('b') => ("0b", format!("{size:b}")),
                    Some('c') => {
                        let code = u32::try_from(size).ok().and_then(char::from_u32);
                        ("", code.ok_or_else(too_large)?.to_string())
                    }
                    _ => ("", size.to_string()),
                };
                let digits = spec.precision.unwrap_or(0).saturating_sub(body.len());
                let body = "0".repeat(digits) + &body;
                (*value < 0, if spec.alternate { prefix } else { "" }, body)
            }
            (value, kind) => {
                let number = value.as_number().unwrap_or_default();
                let body = float_body(number.abs(), kind, spec.precision, spec.alternate)?;
                (number.is_sign_negative() && !number.is_nan(), "", body)
            }
        };
        let body = match spec.grouping {
            Some(separator) => grouped(&body, separator),
            None => body,
        };
        let sign = match (negative, spec.sign) {
            (true, _) => "-",
            (false, Some('+')) => "+",
            (false, Some(' ')) => " ",
            _ => "",
        };
        let head = [sign, prefix].concat();
        let (fill, align) = match spec.zero && spec.fill.is_none() {
            true => ('0', '='),
            false => (spec.fill.unwrap_or(' '), spec.align.unwrap_or('>')),
        };
        self.pad(&head, &body, fill, align, spec.width, out)
    }
}

/// The end of a replacement field that has just been opened.
fn field_end(text: &str) -> Result<usize, Error> {
    let mut depth = 0;
    for (index, character) in text.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => return Ok(index),
            '}' => depth -= 1,
            _ => {}
        }
    }
    Err(Error::failed("expected '}' before end of string"))
}

pub(super) fn take_number(rest: &mut &str) -> Result<Option<usize>, Error> {
    let length = rest.find(|it: char| !it.is_ascii_digit()).unwrap_or(rest.len());
    let (digits, after) = rest.split_at(length);
    *rest = after;
    match digits.is_empty() {
        true => Ok(None),
        false => digits.parse().map(Some).map_err(|_| too_large()),
    }
}

/// `[[fill]align][sign][#][0][width][grouping][.precision][type]`
fn read_spec(text: &str) -> Result<Spec, Error> {
    let mut spec = Spec::default();
    let mut rest = text;
    let mut characters = rest.chars();
    let (first, second) = (characters.next(), characters.next());
    let is_align = |it: Option<char>| it.filter(|it| "<>^=".contains(*it));
    if let (Some(fill), Some(align)) = (first, is_align(second)) {
        (spec.fill, spec.align) = (Some(fill), Some(align));
        rest = &rest[fill.len_utf8() + 1..];
    } else if let Some(align) = is_align(first) {
        spec.align = Some(align);
        rest = &rest[1..];
    }
    if let Some(sign) = rest.chars().next().filter(|it| "+- ".contains(*it)) {
        spec.sign = Some(sign);
        rest = &rest[1..];
    }
    if let Some(after) = rest.strip_prefix('#') {
        spec.alternate = true;
        rest = after;
    }
    if let Some(after) = rest.strip_prefix('0') {
        spec.zero = spec.align.is_none();
        rest = after;
    }
    spec.width = take_number(&mut rest)?.unwrap_or(0);
    if let Some(grouping) = rest.chars().next().filter(|it| ",_".contains(*it)) {
        spec.grouping = Some(grouping);
        rest = &rest[1..];
    }
    if let Some(after) = rest.strip_prefix('.') {
        rest = after;
        let missing = || Error::failed("Format specifier missing precision");
        spec.precision = Some(take_number(&mut rest)?.ok_or_else(missing)?);
    }
    let mut characters = rest.chars();
    spec.kind = characters.next();
    let known = spec.kind.is_none_or(|kind| "sdnxXobceEfFgG%".contains(kind));
    match characters.next().is_none() && known {
        true => Ok(spec),
        false => Err(Error::failed("Invalid format specifier")),
    }
}

fn float_body(
    value: f64,
    kind: Option<char>,
    precision: Option<usize>,
    alternate: bool,
) -> Result<String, Error> {
    let upper = kind.is_some_and(|kind| kind.is_ascii_uppercase());
    let body = match kind.map(|kind| kind.to_ascii_lowercase()) {
        _ if value.is_nan() => "nan".to_owned(),
        _ if value.is_infinite() => "inf".to_owned(),
        Some('f') => format!("{value:.*}", precision.unwrap_or(6)),
        Some('%') => format!("{:.*}%", precision.unwrap_or(6), value * 100.0),
        Some('e') => scientific(value, precision.unwrap_or(6)),
        None if precision.is_none() => super::text::float_text(value),
        None | Some('g' | 'n') => general(value, precision.unwrap_or(6).max(1), alternate),
        Some(other) => return Err(Error::failed(format!("Unknown format code '{other}'"))),
    };
    Ok(if upper { body.to_uppercase() } else { body })
}

fn scientific(value: f64, precision: usize) -> String {
    let text = format!("{value:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

fn general(value: f64, precision: usize, alternate: bool) -> String {
    let text = format!("{value:.*e}", precision - 1);
    let exponent: i32 = text.split_once('e').and_then(|(_, it)| it.parse().ok()).unwrap_or(0);
    let shorten = |text: String| match text.contains('.') && !alternate {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    if (-4..precision as i32).contains(&exponent) {
        let decimals = (precision as i32 - 1 - exponent).max(0) as usize;
        return shorten(format!("{value:.decimals$}"));
    }
    let text = scientific(value, precision - 1);
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, ""));
    format!("{}e{exponent}", shorten(digits.to_owned()))
}

/// Digits before the point in groups of three.
fn grouped(body: &str, separator: char) -> String {
    let end = body.find(|it: char| !it.is_ascii_digit()).unwrap_or(body.len());
    let mut text = String::new();
    for (index, digit) in body[..end].chars().enumerate() {
        if index > 0 && (end - index) % 3 == 0 {
            text.push(separator);
        }
        text.push(digit);
    }
    text + &body[end..]
}
