//! The `glinthawk` binary: parses, prints and shows progress; the work is done by the libraries.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod bench_gpu;
mod bench_parts;
mod device;
mod folder;
mod generate;
mod interrupt;
mod models;
mod outlook;
mod plan;
mod profile;
mod progress;
mod run;
mod simulate;
mod tokenize;
mod typed;
mod units;
mod worker;
mod workloads;

use args::{BenchPart, Cli, Command};
use clap::Parser;
use glinthawk_jobs::JobError;
use glinthawk_launch::{Device, LaunchError};
use std::io::IsTerminal;
use std::process::ExitCode;

/// The command line is wrong; clap exits so by itself.
const EXIT_BAD_USAGE: u8 = 2;

/// The longest message.
const MESSAGE_BYTES_MAX: usize = 4000;

/// Finished, but some lines failed.
const EXIT_LINES_FAILED: u8 = 3;

fn main() -> ExitCode {
    let cli = Cli::parse();
    glinthawk_model::silence_guarded_panics();
    interrupt::survive_file_limits();
    let filter = tracing_subscriber::EnvFilter::try_from_env("GLINTHAWK_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal() && !no_color)
        // Otherwise a log that cannot be written, such as a pipe that is gone, ends the thread.
        .log_internal_errors(false)
        .init();
    let outcome = match cli.command {
        Command::Run(args) => run::run(&args),
        Command::Generate(args) => generate::generate(&args),
        Command::Tokenize(args) => tokenize::tokenize(&args),
        Command::Pull { model } => models::pull(&model),
        Command::Models => models::list(),
        Command::Devices => device::list(),
        Command::Plan(args) => plan::plan(&args),
        Command::Profile(args) => profile::profile(&args),
        Command::Simulate(args) => simulate::simulate(&args),
        Command::Reproduce { output } => plan::reproduce(&output),
        Command::Worker(args) => worker::worker(&args),
        Command::Bench { part: None, args } => bench::bench(&args),
        Command::Bench { part: Some(BenchPart::Kernels(args)), .. } => match args.device {
            Device::Cuda(ordinal) => bench_gpu::kernels(&args, ordinal),
            Device::Auto | Device::Cpu => bench_parts::kernels(&args),
        },
        Command::Bench { part: Some(BenchPart::Net { rows, shape }), .. } => {
            bench_parts::net(rows, &shape)
        }
        Command::Bench { part: Some(BenchPart::Planner), .. } => bench_parts::planner(),
    };
    outcome.unwrap_or_else(|error| {
        progress::say(format_args!("error: {}", message(&error)));
        let bad_options = error.is::<args::Usage>()
            || error.downcast_ref().is_some_and(LaunchError::is_bad_usage);
        if bad_options {
            progress::say("\nFor more information, try '--help'.");
        }
        let bad_files = error.downcast_ref().is_some_and(JobError::is_bad_usage);
        if bad_options || bad_files { ExitCode::from(EXIT_BAD_USAGE) } else { ExitCode::FAILURE }
    })
}

/// An error and its causes, each once: some errors name their cause themselves.
fn message(error: &anyhow::Error) -> String {
    let mut message = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !message.contains(&cause) {
            message += &format!(": {cause}");
        }
    }
    printable(&message)
}

/// A message that may quote what strangers wrote, without what a terminal would obey, and not longer than a page.
fn printable(message: &str) -> String {
    let mut printable = String::new();
    for character in message.chars() {
        if printable.len() > MESSAGE_BYTES_MAX {
            return printable + "…";
        }
        match character {
            '\n' | '\t' => printable.push(character),
            _ if character.is_control() => printable.extend(character.escape_default()),
            _ => printable.push(character),
        }
    }
    printable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_printable() {
        assert_eq!(printable("a\u{1b}[2J\u{7}\n\tü"), "a\\u{1b}[2J\\u{7}\n\tü");
        let long = printable(&"x".repeat(1 << 20));
        assert!(long.len() < MESSAGE_BYTES_MAX + 8 && long.ends_with('…'));
    }
}
