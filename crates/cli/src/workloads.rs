//! Workloads as the command line names them: a CSV of lengths, a job's own input, or so many alike.

use crate::progress::{say, with_bars};
use crate::units;
use anyhow::{Context, bail};
use glinthawk_jobs::Input;
use glinthawk_launch::{lengths, open_text};
use glinthawk_plan::Workload;
use std::path::Path;

/// Reads the workload that the options name, if they name one.
pub fn read(
    file: Option<&Path>,
    alike: Option<&str>,
    model: &str,
) -> anyhow::Result<Option<Workload>> {
    match (file, alike) {
        (Some(path), _) => Ok(Some(read_file(path, model)?)),
        (None, Some(text)) => Ok(Some(parse_alike(text)?)),
        (None, None) => Ok(None),
    }
}

/// A CSV of `prompt_tokens,output_tokens`, or a job's input, by the file's ending.
pub fn read_file(path: &Path, model: &str) -> anyhow::Result<Workload> {
    if path.extension().is_none_or(|extension| extension != "jsonl") {
        return Ok(Workload::read_csv(path)?);
    }
    let served = with_bars(|tell| open_text(model, None, tell))?;
    let survey = Input::File(path.to_owned()).open()?.survey(&served, u64::MAX)?;
    let survey =
        survey.with_context(|| format!("{}: give a file, not a stream", path.display()))?;
    let lengths = lengths(&survey);
    let refused = survey.lines - survey.lengths.len() as u64;
    if survey.lines == 0 {
        bail!("{}: the file is empty", path.display());
    }
    if lengths.is_empty() {
        match survey.lines {
            1 => bail!("{}: its only line cannot be run; `run` says why", path.display()),
            lines => {
                bail!("{}: none of its {lines} lines can be run; `run` says why", path.display())
            }
        }
    }
    if refused > 0 {
        let take = if refused == 1 { "takes" } else { "take" };
        let lines = units::counted(refused, "line");
        say(format_args!("{}: {lines} cannot be run and {take} no time", path.display()));
    }
    Ok(Workload::new(&path.display().to_string(), lengths)?)
}

/// The workload as a model with such a context runs it; says what that leaves out.
pub fn within(workload: &Workload, context_max: usize) -> anyhow::Result<Workload> {
    let (workload, clipped) = workload.within(context_max)?;
    if let Some(words) = clipped.words(context_max) {
        say(words);
    }
    Ok(workload)
}

/// Parses `COUNTxINPUT+OUTPUT`, such as `1000x128+256`.
fn parse_alike(text: &str) -> anyhow::Result<Workload> {
    let parts = text.split_once('x').and_then(|(count, lengths)| {
        let (input, output) = lengths.split_once('+')?;
        Some((count.parse().ok()?, input.parse().ok()?, output.parse().ok()?))
    });
    let (count, input, output): (usize, usize, usize) =
        parts.with_context(|| format!("--prompts {text}: not like 1000x128+256"))?;
    if count == 0 || count > 10_000_000 {
        bail!("--prompts {text}: 1 to 10000000 prompts");
    }
    Ok(Workload::uniform(input, output, count)?)
}
