//! No two files of a crate use each other, directly or through others: a file can be read knowing only
//! what it uses. Parents and children do not count. Imports are one block, in rustfmt's order.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A module's path inside its crate, such as `net::link`; the root is empty.
type Module = Vec<String>;

#[test]
fn no_circles_of_files() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    for name in names_in(&crates) {
        let mut files = BTreeMap::new();
        read_modules(&crates.join(&name).join("src"), &Vec::new(), &mut files);
        assert!(!files.is_empty(), "{name} has no sources");
        found.extend(circles(&files).into_iter().map(|circle| format!("{name}: {circle}")));
    }
    assert!(found.is_empty(), "files that use each other: {found:#?}");
}

#[test]
fn circles_are_found() {
    let check = |files: &[(&str, &str)], expected: &[&str]| {
        let files = files.iter().map(|(module, text)| (path(module), (*text).to_owned()));
        assert_eq!(circles(&files.collect()), expected);
    };
    check(&[("a", "use crate::b::X;"), ("b", "use super::a::{Y, Z};")], &["a, b"]);
    check(&[("a", "use crate::b::X;"), ("b", "// crate::a\nfn f() {}")], &[]);
    check(
        &[("a", "use crate::b;"), ("b", "fn f() { crate::c::g() }"), ("c", "use crate::a;")],
        &["a, b, c"],
    );
    check(
        &[("a", "use crate::{c::{self, X as Y}, d};"), ("c", "use crate::a::T;"), ("d", "")],
        &["a, c"],
    );
    check(&[("a", "mod b; use crate::a::b::X;"), ("a::b", "use super::Y;")], &[]);
    let tested = "#[cfg(test)]\nmod tests {\n    use crate::a::X;\n}\n";
    check(&[("a", "use crate::b::X;"), ("b", tested)], &[]);
}

#[test]
fn imports_are_one_block() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    for name in names_in(&crates) {
        for folder in ["src", "tests"].map(|folder| crates.join(&name).join(folder)) {
            let mut files = BTreeMap::new();
            if folder.is_dir() {
                read_modules(&folder, &Vec::new(), &mut files);
            }
            let cut = files.iter().filter(|(_, text)| are_imports_cut(text));
            found.extend(
                cut.map(|(module, _)| format!("{}: {}", folder.display(), module.join("::"))),
            );
        }
    }
    assert!(found.is_empty(), "blank lines between imports: {found:#?}");
}

#[test]
fn cut_imports_are_found() {
    assert!(!are_imports_cut("use a::b;\nuse std::c;\n\nfn d() {}\n"));
    assert!(are_imports_cut("use a::{\n    b,\n};\n\nuse std::c;\n"));
    assert!(are_imports_cut("mod tests {\n    use super::*;\n\n    use std::c;\n}\n"));
    assert!(!are_imports_cut("pub use a::b;\n\nuse std::c;\n\nmod d {\n    use e::f;\n}\n"));
}

/// Whether only blank lines stand between two imports.
fn are_imports_cut(text: &str) -> bool {
    let (mut inside, mut after, mut blank) = (false, false, false);
    for line in text.lines().map(str::trim) {
        if line.is_empty() {
            blank = true;
            continue;
        }
        let begins = !inside && line.starts_with("use ");
        if begins && after && blank {
            return true;
        }
        let is_import = inside || begins;
        inside = is_import && !line.ends_with(';');
        (after, blank) = (is_import && !inside, false);
    }
    false
}

fn path(module: &str) -> Module {
    module.split("::").filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn read_modules(folder: &Path, inside: &Module, files: &mut BTreeMap<Module, String>) {
    for name in names_in(folder) {
        let here = folder.join(&name);
        if here.is_dir() {
            read_modules(&here, &[&inside[..], &[name]].concat(), files);
        } else if let Some(stem) = name.strip_suffix(".rs") {
            let own =
                if matches!(stem, "lib" | "main" | "mod") { &[][..] } else { &[stem.to_owned()] };
            files.insert([inside, own].concat(), std::fs::read_to_string(&here).unwrap());
        }
    }
}

/// Groups of modules that reach each other, each as its names in order.
fn circles(files: &BTreeMap<Module, String>) -> Vec<String> {
    let mut reached: BTreeMap<&Module, BTreeSet<Module>> = BTreeMap::new();
    let uses: BTreeMap<&Module, BTreeSet<Module>> =
        files.iter().map(|(module, text)| (module, used(module, text, files))).collect();
    for module in files.keys() {
        let mut all = BTreeSet::new();
        let mut next: Vec<&Module> = uses[module].iter().collect();
        while let Some(module) = next.pop() {
            if all.insert(module.clone()) {
                next.extend(&uses[module]);
            }
        }
        reached.insert(module, all);
    }
    let groups = files.keys().map(|module| {
        let back = |other: &&Module| reached[*other].contains(module);
        reached[module].iter().filter(back).cloned().collect::<BTreeSet<Module>>()
    });
    let groups: BTreeSet<BTreeSet<Module>> = groups.filter(|group| group.len() > 1).collect();
    let name = |module: &Module| module.join("::");
    groups.iter().map(|group| group.iter().map(name).collect::<Vec<_>>().join(", ")).collect()
}

/// The files of its crate that a module uses, other than its parents and children.
fn used(module: &Module, text: &str, files: &BTreeMap<Module, String>) -> BTreeSet<Module> {
    let words = words(text);
    let mut paths = Vec::new();
    let mut at = 0;
    while at < words.len() {
        let start = match words[at] {
            "crate" => Some(Vec::new()),
            "super" => Some(module[..module.len().saturating_sub(1)].to_vec()),
            "self" => Some(module.clone()),
            _ => None,
        };
        at += 1;
        // `pub(crate)` and the like begin no path.
        if let Some(start) = start.filter(|_| words.get(at) == Some(&"::")) {
            at = tree(&words, at + 1, start, &mut paths);
        }
    }
    let files = paths.into_iter().map(|mut path: Module| {
        while !files.contains_key(&path) && path.pop().is_some() {}
        path
    });
    files.filter(|file| !file.starts_with(module) && !module.starts_with(file)).collect()
}

/// Reads what follows a `::`: a name, perhaps with more behind it, or a group in braces. Returns where it ends.
fn tree(words: &[&str], mut at: usize, inside: Module, paths: &mut Vec<Module>) -> usize {
    if words.get(at) == Some(&"{") {
        at += 1;
        while at < words.len() && words[at] != "}" {
            let before = at;
            at = tree(words, at, inside.clone(), paths);
            // A comma, or an `as` and its name.
            at = at.max(before + 1);
        }
        return at + 1;
    }
    let Some(name) = words.get(at).filter(|word| word.chars().all(is_of_name)) else {
        paths.push(inside);
        return at;
    };
    let mut path = inside;
    match *name {
        "super" => _ = path.pop(),
        "self" => {}
        name => path.push(name.to_owned()),
    }
    if words.get(at + 1) == Some(&"::") {
        return tree(words, at + 2, path, paths);
    }
    paths.push(path);
    at + 1
}

fn is_of_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Names, `::` and single other characters of a source, without line comments and the tests at its end.
fn words(text: &str) -> Vec<&str> {
    let end = text.find("#[cfg(test)]\nmod ").filter(|&at| text[at..].contains('{'));
    let mut words = Vec::new();
    for line in text[..end.unwrap_or(text.len())].lines() {
        let mut rest = line.split("//").next().unwrap_or_default();
        while let Some(first) = rest.chars().next() {
            let length = match first {
                ':' if rest.starts_with("::") => 2,
                _ if is_of_name(first) => rest.find(|next| !is_of_name(next)).unwrap_or(rest.len()),
                _ => first.len_utf8(),
            };
            let (word, after) = rest.split_at(length);
            if !first.is_whitespace() {
                words.push(word);
            }
            rest = after;
        }
    }
    words
}
