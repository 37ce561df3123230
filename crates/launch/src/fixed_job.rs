//! A job of prompts that are all alike, to measure an engine with.

use crate::error::LaunchError;
use glinthawk_cluster::{Engine, EngineEvent};
use glinthawk_plan::Shape;
use glinthawk_protocol::{Finish, Prompt};
use std::time::Instant;

/// Prompts that are all alike.
#[derive(Clone, Copy)]
pub struct FixedJob {
    /// How many.
    pub prompts: u32,
    /// Tokens of each.
    pub input: u32,
    /// How many of them all prompts begin with.
    pub prefix: u32,
    /// Tokens generated for each.
    pub output: u32,
}

impl FixedJob {
    /// Operations of all products with weights. Every token except the last of each prompt goes through all layers,
    /// and every generated token through the classifier. What all prompts begin with counts once.
    pub fn operations(self, shape: &Shape) -> f64 {
        let layers = shape.layers as f64 * (shape.pre_parameters() + shape.post_parameters());
        let rows = f64::from(self.input - self.prefix + self.output - 1);
        let each = rows * layers + f64::from(self.output) * shape.classify_parameters();
        2.0 * (f64::from(self.prompts) * each + f64::from(self.prefix) * layers)
    }

    /// Runs the job and returns its seconds. The number `run` makes its prompts differ from those of earlier runs.
    pub fn run(self, engine: &mut Engine, vocab: u32, run: u32) -> Result<f64, LaunchError> {
        let started = Instant::now();
        let mut submitted = 0;
        let mut finished = 0;
        while finished < self.prompts {
            while submitted < self.prompts && engine.wants_prompts() {
                engine.submit(self.prompt(vocab, run, submitted))?;
                submitted += 1;
            }
            for event in engine.advance()? {
                let EngineEvent::Finished(completion) = event else { continue };
                if completion.finish == Finish::NoToken {
                    return Err(LaunchError::NothingPicked);
                }
                finished += 1;
            }
        }
        Ok(started.elapsed().as_secs_f64())
    }

    /// A prompt of tokens without meaning: only their number matters here.
    fn prompt(self, vocab: u32, run: u32, index: u32) -> Prompt {
        let id = run * self.prompts + index;
        let token = |position: u32| {
            let id = if position < self.prefix { run } else { id };
            (u64::from(id) * 7919 + u64::from(position) * 104_729) % u64::from(vocab)
        };
        Prompt {
            tokens: (0..self.input).map(|position| token(position) as u32).collect(),
            tokens_max: self.output,
            ..Prompt::default()
        }
    }
}
