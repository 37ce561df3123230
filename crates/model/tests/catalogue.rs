//! What a model's name stands for.

use glinthawk_model::catalogue::{self, CatalogueError, DEFAULT_MODEL, ResolvedModel};
use glinthawk_model::testing;

fn resolve(name: &str) -> Result<ResolvedModel, CatalogueError> {
    catalogue::resolve(name, &mut |_| {})
}

#[test]
fn names_of_things_that_are_here() {
    let dummy = ResolvedModel::Dummy("llama2-70b".to_owned());
    assert_eq!(resolve("dummy:llama2-70b").expect("a shape"), dummy);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let name = folder.path().to_str().expect("UTF-8");
    assert_eq!(resolve(name).expect("a folder"), ResolvedModel::Path(folder.path().to_owned()));
}

#[test]
fn names_of_nothing_say_what_would_be_something() {
    for name in ["no-such-model", "./no/such/folder", "no/such.gguf", ""] {
        let error = resolve(name).expect_err(name).to_string();
        assert!(error.contains(DEFAULT_MODEL) && error.contains(name), "{error}");
    }
}

#[test]
fn the_default_model_is_listed_and_found_again() {
    let Some(path) = testing::default_model() else { return };
    assert_eq!(resolve(DEFAULT_MODEL).expect("cached"), ResolvedModel::Path(path.clone()));
    let listed = catalogue::list();
    let entry = listed.iter().find(|entry| entry.name == DEFAULT_MODEL).expect("listed");
    assert_eq!(entry.cached.as_ref(), Some(&path));
    assert_eq!(std::fs::metadata(&path).expect("a file").len(), entry.size);
    assert_eq!(entry.license, "Apache-2.0");
}
