//! What chat templates expect beyond plain Jinja: the dialect of Hugging Face's `transformers`.

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, Value};

/// Said by a template through `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Refused(pub(super) String);

pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the usual delimiters are valid"));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", tojson);
    environment
}

fn raise_exception(reason: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Refused(reason)))
}

/// Formats the one day there is here, 26 July 2024 at midnight.
fn strftime_now(format: String) -> Result<String, Error> {
    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        text.push_str(match characters.next() {
            Some('Y') => "2024",
            Some('y') => "24",
            Some('m') => "07",
            Some('B') => "July",
            Some('b' | 'h') => "Jul",
            Some('d' | 'e') => "26",
            Some('j') => "208",
            Some('A') => "Friday",
            Some('a') => "Fri",
            Some('H' | 'M' | 'S') => "00",
            Some('I') => "12",
            Some('p') => "AM",
            Some('%') => "%",
            other => {
                let directive = other.map(String::from).unwrap_or_default();
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now: unknown directive %{directive}"),
                ));
            }
        });
    }
    Ok(text)
}

/// JSON as Python's `json.dumps` writes it, without escapes for HTML or for other scripts.
fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let value = serde_json::to_value(&value).map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "tojson: not a JSON value").with_source(error)
    })?;
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let mut layout = JsonLayout::new(indent);
    if let Some([item, key]) = separators.as_deref() {
        layout.item_separator.clone_from(item);
        layout.key_separator.clone_from(key);
    }
    layout.sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    if options.get::<Option<bool>>("ensure_ascii")? == Some(true) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson: ensure_ascii is not supported",
        ));
    }
    options.assert_all_used()?;
    let mut text = String::new();
    layout.write(&value, 0, &mut text);
    Ok(Value::from_safe_string(text))
}

struct JsonLayout {
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl JsonLayout {
    fn new(indent: Option<usize>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " };
        Self {
            indent,
            item_separator: item_separator.to_owned(),
            key_separator: ": ".to_owned(),
            sort_keys: false,
        }
    }

    fn write(&self, value: &serde_json::Value, depth: usize, text: &mut String) {
        match value {
            serde_json::Value::Array(items) if !items.is_empty() => {
                text.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.begin_item(index, depth + 1, text);
                    self.write(item, depth + 1, text);
                }
                self.new_line(depth, text);
                text.push(']');
            }
            serde_json::Value::Object(fields) if !fields.is_empty() => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.sort_keys {
                    fields.sort_by_key(|&(key, _)| key);
                }
                text.push('{');
                for (index, (key, field)) in fields.into_iter().enumerate() {
                    self.begin_item(index, depth + 1, text);
                    write_string(key, text);
                    text.push_str(&self.key_separator);
                    self.write(field, depth + 1, text);
                }
                self.new_line(depth, text);
                text.push('}');
            }
            serde_json::Value::String(string) => write_string(string, text),
            serde_json::Value::Number(number) if number.is_f64() => {
                text.push_str(&python_float(number.as_f64().unwrap_or_default()));
            }
            other => text.push_str(&other.to_string()),
        }
    }

    fn begin_item(&self, index: usize, depth: usize, text: &mut String) {
        if index > 0 {
            text.push_str(&self.item_separator);
        }
        self.new_line(depth, text);
    }

    fn new_line(&self, depth: usize, text: &mut String) {
        if let Some(indent) = self.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }
}

fn write_string(string: &str, text: &mut String) {
    text.push('"');
    for character in string.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            '\u{c}' => text.push_str("\\f"),
            control if control < ' ' => text.push_str(&format!("\\u{:04x}", control as u32)),
            other => text.push(other),
        }
    }
    text.push('"');
}

/// Python's shortest form: fixed between 1e-4 and 1e16, else with a two-digit exponent.
fn python_float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(-4..=15) => format!("{value:?}"),
        Ok(exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        Err(_) => scientific,
    }
}

/// Replaces `{% generation %}` and `{% endgeneration %}`, which only mark the assistant's words
/// for training, by blocks that change nothing.
pub(super) fn without_generation_marks(source: &str) -> String {
    let mut text = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}").map(|end| end + 2) else { break };
        let (before, tag) = (&rest[..start], &rest[start..start + length]);
        let word = tag.trim_matches(['{', '}', '%', '-', '+', ' ', '\n', '\t']);
        text.push_str(before);
        match word {
            "generation" => text.push_str(&tag.replace(word, "if true")),
            "endgeneration" => text.push_str(&tag.replace(word, "endif")),
            _ => text.push_str(tag),
        }
        rest = &rest[start + length..];
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(template: &str, expected: &str) {
        let value = serde_json::json!({
            "name": "naïve <b> & \"q\"\n\u{1}",
            "numbers": [1, 2.0, 1e16, 1e-5, 0.25, -3],
            "empty": [{}, []],
            "flags": {"b": true, "a": null},
        });
        let context = minijinja::context! { value => minijinja::value::Serde(value) };
        assert_eq!(environment().render_str(template, context).expect(template), expected);
    }

    #[test]
    fn json_is_pythons() {
        check(
            "{{ value | tojson }}",
            "{\"name\": \"naïve <b> & \\\"q\\\"\\n\\u0001\", \
             \"numbers\": [1, 2.0, 1e+16, 1e-05, 0.25, -3], \
             \"empty\": [{}, []], \"flags\": {\"b\": true, \"a\": null}}",
        );
        check("{{ value.flags | tojson(indent=2) }}", "{\n  \"b\": true,\n  \"a\": null\n}");
        check("{{ value.flags | tojson(sort_keys=true) }}", "{\"a\": null, \"b\": true}");
        check("{{ value.flags | tojson(separators=(',', ':')) }}", "{\"b\":true,\"a\":null}");
    }

    #[test]
    fn the_date_never_changes() {
        check("{{ strftime_now('%d %b %Y, %A %B') }}", "26 Jul 2024, Friday July");
        let error = environment().render_str("{{ strftime_now('%Q') }}", ()).expect_err("%Q");
        assert!(error.to_string().contains("%Q"), "{error}");
    }

    #[test]
    fn generation_marks_change_nothing() {
        let source = "{% if true %}a\n{%- generation %} b{% endgeneration -%}\n c{% endif %}";
        let marked = without_generation_marks(source);
        assert_eq!(environment().render_str(&marked, ()).expect("renders"), "a bc");
        let generation = "{{ generation }} {% set generation = 1 %}";
        assert_eq!(without_generation_marks(generation), generation);
    }
}
