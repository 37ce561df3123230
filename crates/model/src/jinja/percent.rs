//! `'%s' % x` as Python does it.

use super::Error;
use super::format::{Spec, take_number};
use super::machine::Machine;
use super::operators::too_large;
use super::value::{SequenceKind, Value};

/// The arguments, one after another.
type Values = std::vec::IntoIter<Value>;

impl Machine {
    /// `format % arguments`, and the filter `format`.
    pub(super) fn percent(&self, format: &str, arguments: &Value) -> Result<String, Error> {
        let mut values: Values = match arguments {
            Value::Sequence(it) if it.kind == SequenceKind::Tuple => it.items.clone().into_iter(),
            value => vec![value.clone()].into_iter(),
        };
        let mut named = matches!(arguments, Value::Dictionary(_));
        let mut out = String::new();
        let mut rest = format;
        while let Some(start) = rest.find('%') {
            self.budget.spend(start + 1)?;
            out.push_str(&rest[..start]);
            rest = &rest[start + 1..];
            let mut source = None;
            if let Some(name) = rest.strip_prefix('(') {
                let end = name.find(')').ok_or_else(|| Error::failed("incomplete format key"))?;
                source = Some(self.item(arguments, &Value::text(&name[..end]))?);
                named = true;
                rest = &name[end + 1..];
            }
            let spec = self.percent_spec(&mut rest, &mut values)?;
            let Some(kind) = rest.chars().next() else {
                return Err(Error::failed("incomplete format"));
            };
            rest = &rest[kind.len_utf8()..];
            if kind == '%' {
                out.push('%');
                continue;
            }
            let value = source.map_or_else(|| next(&mut values), Ok)?;
            self.percent_one(kind, spec, &value, &mut out)?;
        }
        self.budget.spend(rest.len())?;
        out.push_str(rest);
        if values.next().is_some() && !named {
            return Err(Error::failed("not all arguments converted during string formatting"));
        }
        Ok(out)
    }

    /// Flags, width and precision; `*` takes them from the arguments.
    fn percent_spec(&self, rest: &mut &str, values: &mut Values) -> Result<Spec, Error> {
        let mut spec = Spec { align: Some('>'), ..Spec::default() };
        while let Some(flag) = rest.chars().next().filter(|it| "-+ #0".contains(*it)) {
            match flag {
                '-' => spec.align = Some('<'),
                '#' => spec.alternate = true,
                '0' => spec.zero = true,
                '+' => spec.sign = Some('+'),
                _ => spec.sign = spec.sign.or(Some(' ')),
            }
            *rest = &rest[1..];
        }
        if let Some(after) = rest.strip_prefix('*') {
            *rest = after;
            let width = self.expect_integer(&next(values)?, "* wants int")?;
            if width < 0 {
                spec.align = Some('<');
            }
            spec.width = usize::try_from(width.unsigned_abs()).map_err(|_| too_large())?;
        } else {
            spec.width = take_number(rest)?.unwrap_or(0);
        }
        if let Some(after) = rest.strip_prefix('.') {
            *rest = after;
            spec.precision = Some(if let Some(after) = rest.strip_prefix('*') {
                *rest = after;
                usize::try_from(self.expect_integer(&next(values)?, "* wants int")?).unwrap_or(0)
            } else {
                take_number(rest)?.unwrap_or(0)
            });
        }
        *rest = rest.strip_prefix(['l', 'h', 'L']).unwrap_or(rest);
        spec.zero &= spec.align != Some('<');
        Ok(spec)
    }

    fn percent_one(
        &self,
        kind: char,
        mut spec: Spec,
        value: &Value,
        out: &mut String,
    ) -> Result<(), Error> {
        let wrong = || {
            let name = value.type_name();
            Error::failed(format!("%{kind} format: a number is required, not {name}"))
        };
        match kind {
            's' | 'r' | 'a' => {
                let mut text = String::new();
                match kind {
                    's' => self.write(value, &mut text)?,
                    _ => self.write_repr(value, 0, &mut text)?,
                }
                spec.zero = false;
                self.pad_text(&text, &spec, out)
            }
            'c' => {
                let text = match value {
                    Value::Text(text) if text.chars().count() == 1 => text.to_string(),
                    value => {
                        let code = value.as_integer().and_then(|it| u32::try_from(it).ok());
                        code.and_then(char::from_u32).ok_or_else(wrong)?.to_string()
                    }
                };
                self.pad_text(&text, &Spec { precision: None, zero: false, ..spec }, out)
            }
            'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
                let number = match (value, kind) {
                    (Value::Float(number), 'd' | 'i' | 'u') if number.is_finite() => {
                        Value::Integer(*number as i128)
                    }
                    (value, _) => Value::Integer(value.as_integer().ok_or_else(wrong)?),
                };
                spec.kind = Some(if matches!(kind, 'i' | 'u') { 'd' } else { kind });
                self.write_number(&number, spec, out)
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                let number = value.as_number().ok_or_else(wrong)?;
                spec.kind = Some(kind);
                self.write_number(&Value::Float(number), spec, out)
            }
            _ => Err(Error::failed(format!("unsupported format character '{kind}'"))),
        }
    }
}

fn next(values: &mut Values) -> Result<Value, Error> {
    values.next().ok_or_else(|| Error::failed("not enough arguments for format string"))
}
