//! The command as the user typed it, for errors that another option or another input resolves.

use crate::args::RunArgs;
use anyhow::anyhow;
use glinthawk_cluster::ClusterError;
use glinthawk_jobs::{JobError, Remedy, shell_quoted};
use std::ffi::{OsStr, OsString};
use std::path::Path;

/// The error of a `run`; if a command would go on from there, with that command.
pub fn with_command(error: anyhow::Error, args: &RunArgs) -> anyhow::Error {
    let job_error = match error.downcast_ref() {
        Some(ClusterError::Job(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    let typed: Vec<OsString> = std::env::args_os().collect();
    match job_error {
        Some(error @ JobError::Unmatched(unmatched)) if !unmatched.would_be_doubled() => {
            anyhow!("{error}. For example: {}", with_option(&typed, "--keep"))
        }
        Some(error @ JobError::NotOurs { .. }) => {
            anyhow!("{error}: {}", with_option(&typed, "--overwrite"))
        }
        Some(JobError::NotRequests {
            input,
            what,
            remedy: Remedy::Pipe { purpose, command, output },
        }) => {
            let run = from_pipe(&typed, args, output);
            anyhow!("{input} is {what}. {purpose} and pipe it in: {command} | {run}")
        }
        _ if args.overwrite && says_how_to_go_on(&error, job_error) => {
            anyhow!("{error} (without --overwrite, which would remove what is finished)")
        }
        _ => error,
    }
}

/// Whether the error says that the same command continues.
fn says_how_to_go_on(error: &anyhow::Error, job_error: Option<&JobError>) -> bool {
    use ClusterError::{Failed, Lost};
    matches!(error.downcast_ref(), Some(Lost { .. } | Failed { .. }))
        || matches!(job_error, Some(JobError::OutputMoved { .. } | JobError::OutputDeleted { .. }))
}

/// The command with one more option.
fn with_option(typed: &[OsString], option: &str) -> String {
    // --keep and --overwrite exclude each other.
    let mut words: Vec<String> =
        typed.iter().filter(|word| *word != "--keep").map(|word| quoted(word)).collect();
    let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
    words.insert(end, option.to_owned());
    words.join(" ")
}

/// The command with standard input for its input, and with an output if it would otherwise have lost its own.
fn from_pipe(typed: &[OsString], args: &RunArgs, output: &str) -> String {
    let input = args.input.as_os_str();
    let mut words: Vec<String> = typed.iter().map(|word| quoted(word)).collect();
    if let Some(place) = typed.iter().rposition(|word| word == input) {
        words[place] = "-".to_owned();
    }
    if args.output.is_none() && input != "-" {
        let end = words.iter().position(|word| word == "--").unwrap_or(words.len());
        words.insert(end, format!("-o {output}"));
    }
    words.join(" ")
}

fn quoted(word: &OsStr) -> String {
    shell_quoted(Path::new(word))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn an_option_is_added_to_what_was_typed() {
        let check = |typed: &str, expected: &str| {
            assert_eq!(with_option(&words(typed), "--overwrite"), expected);
        };
        check("glinthawk run a -o b", "glinthawk run a -o b --overwrite");
        check("glinthawk run --keep a$ -o b", "glinthawk run 'a$' -o b --overwrite");
        check("glinthawk run -o b -- a", "glinthawk run -o b --overwrite -- a");
    }

    #[test]
    fn a_pipe_takes_the_inputs_place() {
        let check = |typed: &str, expected: &str| {
            let Command::Run(args) = Cli::parse_from(words(typed)).command else {
                panic!("it is `run`")
            };
            assert_eq!(from_pipe(&words(typed), &args, "a.out.jsonl"), expected);
        };
        check("glinthawk run a.gz -o b -m m", "glinthawk run - -o b -m m");
        check("glinthawk run -m m a.gz", "glinthawk run -m m - -o a.out.jsonl");
        check("glinthawk run - -m m", "glinthawk run - -m m");
    }
}
