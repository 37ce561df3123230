//! `worker`: a process that joins a dispatcher.

use crate::args::WorkerArgs;
use crate::setup;
use anyhow::Context;
use glinthawk_cluster::net::Token;
use glinthawk_cluster::{TOKEN_VARIABLE, WorkerOptions, keep_to_cores, work};
use std::process::ExitCode;

/// Works until the dispatcher says goodbye.
pub fn worker(args: &WorkerArgs) -> anyhow::Result<ExitCode> {
    let token = std::env::var(TOKEN_VARIABLE).with_context(|| {
        format!("set {TOKEN_VARIABLE} to the cluster's secret, the same as on the dispatcher")
    })?;
    if !args.cores.is_empty() {
        keep_to_cores(&args.cores)?;
    }
    let options = WorkerOptions {
        join: args.join.clone(),
        token: Token::new(&token),
        tier: args.tier,
        place: args.place,
        isa: setup::isa(args.isa)?,
        threads: setup::threads(args.threads)?,
        memory_bytes: match args.context_memory {
            Some(bytes) => bytes,
            None => setup::free_memory_bytes()? / 2,
        },
    };
    work(&options)?;
    Ok(ExitCode::SUCCESS)
}
