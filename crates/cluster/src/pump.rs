//! Keeps an engine fed from a job and a job's output fed from the engine.

use crate::engine::{Engine, EngineEvent};
use crate::error::ClusterError;
use glinthawk_jobs::{Job, Next};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long an idle engine waits for a line before it looks at the interrupt again.
const WAIT_IDLE: Duration = Duration::from_millis(50);
/// How long a busy engine waits: the next line of a file arrives sooner than this.
const WAIT_BUSY: Duration = Duration::from_millis(2);
/// For how long prompts are gathered before anything is in the air: prompts are seated evenly, and a
/// flight that leaves with a few rows is away as long as a full one.
const GATHER: Duration = Duration::from_millis(250);

/// Runs a job to its end or until `interrupted` is set; calls `observe` after every batch.
pub fn run_job(
    engine: &mut Engine,
    job: &mut Job,
    interrupted: &AtomicBool,
    observe: &mut dyn FnMut(&Engine, &Job),
) -> Result<(), ClusterError> {
    let mut exhausted = false;
    while !interrupted.load(Ordering::Relaxed) {
        let gathered_by = Instant::now() + if engine.is_grounded() { GATHER } else { WAIT_BUSY };
        while !exhausted && engine.wants_prompts() {
            let wait = match engine.is_idle() {
                true => WAIT_IDLE,
                false => WAIT_BUSY.min(gathered_by.saturating_duration_since(Instant::now())),
            };
            match job.next(wait)? {
                Next::Prompt(prompt) => match engine.submit(prompt) {
                    Ok(id) => job.submitted(id),
                    Err(rejection) => job.reject(&rejection.to_string())?,
                },
                Next::Later => break,
                Next::Exhausted => exhausted = true,
            }
        }
        for event in engine.advance()? {
            match event {
                EngineEvent::Token(id, generated) => {
                    if let Some(tokens_kept) = job.token(id, &generated) {
                        engine.stop(id, tokens_kept as usize);
                    }
                }
                EngineEvent::Finished(completion) => job.finish(&completion)?,
            }
        }
        observe(engine, job);
        if exhausted && engine.is_idle() && job.is_idle() {
            break;
        }
    }
    Ok(())
}
