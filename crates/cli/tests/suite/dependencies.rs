//! What the program is built of: only crates of the registry, under licences that `deny.toml` allows. `cargo deny` checks
//! this and known advisories; this part of it needs nothing installed.

use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Whether a licence expression can be met with the allowed licences. `AND` binds closer than `OR`.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let spaced = spaced.replace(" WITH ", "_WITH_");
    let mut words = spaced.split_whitespace().peekable();
    fn either<'a>(
        words: &mut std::iter::Peekable<impl Iterator<Item = &'a str>>,
        allowed: &BTreeSet<String>,
    ) -> bool {
        let (mut any, mut all) = (false, true);
        loop {
            all &= match words.next() {
                Some("(") => either(words, allowed),
                Some(name) => allowed.contains(&name.replace("_WITH_", " WITH ")),
                None => false,
            };
            match words.next() {
                Some("AND") => {}
                Some("OR") => (any, all) = (any | all, true),
                _ => return any | all,
            }
        }
    }
    either(&mut words, allowed)
}

#[test]
fn licence_expressions_are_understood() {
    let allowed =
        BTreeSet::from(["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].map(String::from));
    for (expression, expected) in [
        ("MIT", true),
        ("GPL-3.0", false),
        ("MIT OR GPL-3.0", true),
        ("GPL-3.0/MIT", true),
        ("MIT AND GPL-3.0", false),
        ("(GPL-3.0 OR MIT) AND ISC", true),
        ("(GPL-3.0 OR MIT) AND GPL-3.0", false),
        ("Apache-2.0 WITH LLVM-exception", true),
        ("Apache-2.0", false),
    ] {
        assert_eq!(is_allowed(expression, &allowed), expected, "{expression}");
    }
}

#[test]
fn dependencies_are_of_the_registry_and_under_allowed_licences() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let rules = std::fs::read_to_string(root.join("deny.toml")).expect("the rules");
    let rules: toml::Table = rules.parse().expect("TOML");
    let allowed = rules["licenses"]["allow"].as_array().expect("a list");
    let allowed = allowed.iter().map(|name| name.as_str().expect("a name").to_owned()).collect();
    let mut command = Command::new(env!("CARGO"));
    command.args(["metadata", "--format-version", "1", "--locked", "--offline"]);
    command.args(["--filter-platform", "x86_64-unknown-linux-gnu"]).current_dir(&root);
    let output = command.output().expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let packages = metadata["packages"].as_array().expect("a list");
    let mut wrong = Vec::new();
    for package in packages.iter().filter(|package| !package["source"].is_null()) {
        let text = |field: &str| package[field].as_str().unwrap_or_default();
        let (name, licence, source) = (text("name"), text("license"), text("source"));
        if !source.starts_with("registry+") || !is_allowed(licence, &allowed) {
            wrong.push(format!("{name}: {licence} from {source}"));
        }
    }
    assert!(packages.len() > 50 && wrong.is_empty(), "{wrong:#?}");
}
