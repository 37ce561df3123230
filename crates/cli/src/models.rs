//! `pull` and `models`.

use crate::progress::with_bars;
use crate::units;
use glinthawk_launch::LaunchNews;
use glinthawk_model::catalogue::{self, DEFAULT_MODEL, ResolvedModel};
use std::io::{Write, stdout};
use std::process::ExitCode;

/// Fetches a model and says where it is.
pub fn pull(name: &str) -> anyhow::Result<ExitCode> {
    match resolve(name)? {
        ResolvedModel::Path(path) => writeln!(stdout(), "{}", path.display())?,
        ResolvedModel::Dummy(shape) => {
            writeln!(stdout(), "dummy:{shape} is made up as it is used; nothing to fetch")?
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Finds a model, with a progress bar where it has to be fetched.
pub fn resolve(name: &str) -> anyhow::Result<ResolvedModel> {
    Ok(with_bars(|tell| {
        catalogue::resolve(name, &mut |progress| tell(LaunchNews::Pulling(progress)))
    })?)
}

/// Prints the catalogue.
pub fn list() -> anyhow::Result<ExitCode> {
    let mut out = stdout().lock();
    for entry in catalogue::list() {
        let default = if entry.name == DEFAULT_MODEL { " (the default)" } else { "" };
        writeln!(out, "{}{default}", entry.name)?;
        writeln!(out, "    {}", entry.description)?;
        writeln!(out, "    {}, {}", units::bytes(entry.size), entry.license)?;
        match entry.cached {
            Some(path) => writeln!(out, "    in {}", path.display())?,
            None => writeln!(out, "    not here yet: glinthawk pull {}", entry.name)?,
        }
    }
    writeln!(
        out,
        "\nAlso: a folder or .gguf file, org/name of the Hugging Face hub, dummy:SHAPE."
    )?;
    Ok(ExitCode::SUCCESS)
}
