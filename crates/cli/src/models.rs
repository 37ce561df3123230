//! `pull` and `models`.

use crate::progress::PullBar;
use crate::units;
use glinthawk_model::catalogue::{self, DEFAULT_MODEL, ResolvedModel};
use std::process::ExitCode;

/// Fetches a model and says where it is.
pub fn pull(name: &str) -> anyhow::Result<ExitCode> {
    match resolve(name)? {
        ResolvedModel::Path(path) => println!("{}", path.display()),
        ResolvedModel::Dummy(shape) => {
            println!("dummy:{shape} is made up as it is used; nothing to fetch")
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds a model, with a progress bar where it has to be fetched.
pub fn resolve(name: &str) -> anyhow::Result<ResolvedModel> {
    let mut bar = PullBar::new();
    let resolved = catalogue::resolve(name, &mut |progress| bar.show(progress));
    bar.clear();
    Ok(resolved?)
}

/// Prints the catalogue.
pub fn list() -> anyhow::Result<ExitCode> {
    for entry in catalogue::list() {
        let default = if entry.name == DEFAULT_MODEL { " (the default)" } else { "" };
        println!("{}{default}", entry.name);
        println!("    {}", entry.description);
        println!("    {}, {}", units::bytes(entry.size), entry.license);
        match entry.cached {
            Some(path) => println!("    in {}", path.display()),
            None => println!("    not here yet: glinthawk pull {}", entry.name),
        }
    }
    println!("\nAlso: a folder or .gguf file, org/name of the Hugging Face hub, dummy:SHAPE.");
    Ok(ExitCode::SUCCESS)
}
