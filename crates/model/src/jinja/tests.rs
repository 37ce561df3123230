//! What Jinja2 makes of templates is what this makes of them; and no template gets out of hand.

use super::{Budget, Error, ErrorKind, Template, Value};
use serde::Deserialize;

/// What Jinja2, set up as `transformers` does, makes of a template: see `scripts/jinja-cases`.
#[derive(Deserialize)]
struct Case {
    template: String,
    #[serde(default)]
    variables: serde_json::Map<String, serde_json::Value>,
    text: Option<String>,
}

fn value_of(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::Null => Value::None,
        serde_json::Value::Bool(value) => Value::Bool(*value),
        serde_json::Value::Number(number) => match number.as_i64() {
            Some(number) => Value::Integer(number.into()),
            None => Value::Float(number.as_f64().expect("a number")),
        },
        serde_json::Value::String(text) => Value::text(text.as_str()),
        serde_json::Value::Array(items) => {
            Value::list(items.iter().map(value_of).collect()).expect("not nested deeply")
        }
        serde_json::Value::Object(fields) => {
            let entries = fields.iter().map(|(key, it)| (Value::text(key.as_str()), value_of(it)));
            Value::dictionary(entries.collect()).expect("not nested deeply")
        }
    }
}

fn render(
    template: &str,
    variables: &serde_json::Map<String, serde_json::Value>,
) -> Result<String, Error> {
    let variables = variables.iter().map(|(name, it)| (name.as_str().into(), value_of(it)));
    let budget = Budget::of_bytes(32 << 20);
    Template::parse(template)?.render(variables.collect(), budget)
}

#[test]
fn templates_render_as_in_jinja2() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/jinja.json");
    let cases = std::fs::read_to_string(path).expect("the cases");
    let cases: Vec<Case> = serde_json::from_str(&cases).expect("cases in JSON");
    let mut wrong = Vec::new();
    for case in &cases {
        let rendered = render(&case.template, &case.variables);
        if rendered.as_ref().ok() != case.text.as_ref() {
            let rendered = rendered.map_err(|error| error.to_string());
            wrong.push(format!("{:?}\n  {rendered:?}, not {:?}", case.template, case.text));
        }
    }
    let (wrong_count, count) = (wrong.len(), cases.len());
    assert!(wrong.is_empty(), "{wrong_count} of {count}:\n{}", wrong.join("\n"));
}

#[test]
fn errors_name_the_line_and_the_cause() {
    let cases = [
        ("a\n{{ b.c }}", "line 2: 'b' is undefined"),
        ("{% if true %}\n\n{{ 1 + 'x' }}{% endif %}", "line 3: unsupported operand types for +"),
        ("\n{% frobnicate %}", "line 2: unknown tag `frobnicate`"),
        ("{{ 1 | frobnicate }}", "line 1: no filter named 'frobnicate'"),
        ("{% if a %}", "line 1: `endif` is missing"),
        ("\n{% include 'b' %}", "line 2: `include`: there is no other template"),
    ];
    for (template, expected) in cases {
        let message = render(template, &serde_json::Map::new())
            .map_or_else(|error| error.to_string(), |_| String::new());
        assert!(message.starts_with(expected), "{template}: {message}");
    }
}

/// Runs in little memory and stack: a test's thread has 2 MiB.
fn check_bounded(template: &str) {
    let shown: String = template.chars().take(100).collect();
    let error = render(template, &serde_json::Map::new()).expect_err(&shown);
    let bounded = [ErrorKind::Exhausted, ErrorKind::Syntax].contains(&error.kind)
        || error.message == "a number is too large";
    assert!(bounded, "{shown}: {error}");
}

#[test]
fn depth_is_bounded() {
    let many = 100_000;
    for (open, inside, close) in [
        ("(", "1", ")"),
        ("[", "", "]"),
        ("{1:", "1", "}"),
        ("not ", "1", ""),
        ("-", "1", ""),
        ("1 if 1 else ", "1", ""),
        ("f(", "", ")"),
    ] {
        check_bounded(&format!(
            "{{{{ {}{inside}{} }}}}",
            open.repeat(many / 2),
            close.repeat(many / 2)
        ));
    }
    check_bounded(&format!("{}{}", "{% if 1 %}".repeat(50_000), "{% endif %}".repeat(40_000)));
    for template in [
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(a=f()) %}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ caller() }}{% endmacro %}\
         {% macro g() %}{% call f() %}{{ g() }}{% endcall %}{% endmacro %}{{ g() }}",
        "{% for i in [[1]] recursive %}{{ loop([i]) }}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.a = [{'b': ns}] %}{{ ns.a }}",
    ] {
        check_bounded(template);
    }
    for nested in ["[it]", "(it,)", "{1: it}", "[it]|batch(1)", "cycler(it)"] {
        let nested = nested.replace("it", "ns.it");
        check_bounded(&format!(
            "{{% set ns = namespace(it=1) %}}{{% for i in range(99999) %}}\
             {{% set ns.it = {nested} %}}{{% endfor %}}"
        ));
    }
    check_bounded(
        "{% set ns = namespace(it=1) %}{% for i in range(99999) %}{% for j in [ns.it] %}\
         {% set ns.it = loop %}{% endfor %}{% endfor %}",
    );
}

#[test]
fn long_chains_are_not_deep() {
    let many = 50_000;
    for (link, expected) in
        [("+1", "50001"), ("~''", "1"), (" and 1", "1"), ("<=1", "True"), ("|abs", "1")]
    {
        let template = format!("{{{{ 1{} }}}}", link.repeat(many));
        let text = render(&template, &serde_json::Map::new()).expect(link);
        assert_eq!(text, expected, "{link}");
    }
    let branches = format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(many));
    assert_eq!(render(&branches, &serde_json::Map::new()).expect("branches"), "");
}

#[test]
fn time_memory_and_output_are_bounded() {
    for doubled in [
        "ns.s ~ ns.s",
        "ns.s + ns.s",
        "[ns.s, ns.s]|join",
        "ns.s|replace('a', 'aa')",
        "ns.s.replace('', 'aa')",
        "'%s%s' % (ns.s, ns.s)",
        "'{0}{0}'.format(ns.s)",
        "ns.s.join([ns.s, ns.s])",
        "ns.s * 2",
        "ns.s|indent(ns.s, true)",
    ] {
        check_bounded(&format!(
            "{{% set ns = namespace(s='aa') %}}{{% for i in range(60) %}}\
             {{% set ns.s = {doubled} %}}{{% endfor %}}{{{{ ns.s }}}}"
        ));
    }
    for template in [
        "{{ 'a' * 10**12 }}",
        "{{ [1] * 10**12 }}",
        "{{ 'a'|indent(10**12) }}",
        "{{ [1]|tojson(indent=10**12) }}",
        "{{ 'a'.center(10**12) }}",
        "{{ 'a'.zfill(10**30) }}",
        "{{ '\\t'.expandtabs(10**12) }}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ '%.100000f' % 1 }}",
        "{{ '{:1000000000000}'.format(1) }}",
        "{{ 10**10**10 }}",
        "{{ range(10**12) }}",
        "{{ [1]|batch(10**12, 1)|list }}",
        "{{ [1]|slice(10**12)|list }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}\
         {% endfor %}{{ ns.l }}",
        "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}\
         {% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
        "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{% if 'b' in s %}{% endif %}{% endfor %}",
        "{% set s = 'a' * 1000000 %}{% for i in range(99999) %}{{ s[5] }}{% endfor %}",
        "{{ range(99999)|unique|list }}",
        "{% for i in range(99999) %}{% macro f() %}{% endmacro %}{{ 'x' * 1000 }}{% endfor %}",
    ] {
        check_bounded(template);
    }
    let long = format!("{{# {} #}}", "x".repeat(super::SOURCE_BYTES_MAX));
    check_bounded(&long);
}
