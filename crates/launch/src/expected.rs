//! What is known of a job before it begins: how many prompts it has and how long they are.

use crate::fixed_job::FixedJob;
use glinthawk_cluster::Crowd;
use glinthawk_jobs::{Beginning, JobStanding, Survey};
use glinthawk_plan::{Common, Deployment, Forecast, Length, Workload, forecast};
use std::collections::HashMap;
use std::ops::Range;

/// Lines that are read to learn how long prompts are.
pub const LINES_SURVEYED: u64 = 2000;
/// Prompts of a job that a forecast is given; more of the same take proportionally longer.
const PROMPTS_FORECAST: usize = 50_000;

/// The lengths of a job's prompts.
pub struct Expected {
    /// Those of some prompts.
    workload: Workload,
    /// How many prompts there are: a request with `n` choices is `n` prompts.
    prompts: usize,
}

impl Expected {
    /// From a survey of the job's input, and how much of it is done already; `None` where no line
    /// of it is left that can be run. `sharing`: what prompts have in common is computed once.
    pub fn of(survey: &Survey, standing: Option<JobStanding>, sharing: bool) -> Option<Self> {
        let lengths = lengths(survey);
        // The lines that are left are taken to be like those that were read.
        let left = standing.map_or(survey.lines, |standing| standing.lines - standing.done);
        let share = left as f64 / survey.lines_read as f64;
        let prompts = (lengths.len() as f64 * share).round() as usize;
        if prompts == 0 {
            return None;
        }
        let workload = Workload::new("input", lengths).ok()?;
        let workload = if sharing { workload } else { workload.unshared() };
        Some(Self { workload, prompts })
    }

    /// Prompts that are all alike; `None` if they have no tokens.
    pub fn alike(job: &FixedJob) -> Option<Self> {
        let (prompt, output, prompts) =
            (job.input as usize, job.output as usize, job.prompts as usize);
        let common = Common { tokens: job.prefix as usize, ..Common::default() };
        let workload = Workload::new("alike", vec![Length { prompt, output, common }; prompts]);
        Some(Self { workload: workload.ok()?, prompts })
    }

    /// What matters of it for the engine's shape.
    pub fn crowd(&self) -> Crowd {
        let lengths = self.workload.lengths();
        let average = |tokens: fn(&Length) -> usize| {
            lengths.iter().map(tokens).sum::<usize>() / lengths.len()
        };
        // What prompts have in common is computed and held once, so it makes no rows for further lanes.
        let own = |length: &Length| match length.common.again {
            true => 1,
            false => length.prompt.saturating_sub(length.common.tokens).max(1),
        };
        let (input, output) = (average(own), average(|length| length.output));
        let common = average(|length| match length.common.again {
            true => length.prompt,
            false => length.common.tokens,
        });
        let alike = Crowd::are_alike(common, input + output);
        Crowd { prompts: self.prompts, input, output, alike }
    }

    /// Prompt and generated tokens of all prompts.
    pub(crate) fn tokens(&self) -> f64 {
        let read = self.workload.lengths().len() as f64;
        (self.workload.rows() + read) * self.prompts as f64 / read
    }

    /// Tokens of the longest prompt.
    pub(crate) fn longest(&self) -> usize {
        self.workload.lengths().iter().map(|length| length.prompt).max().unwrap_or(0)
    }

    /// What all prompts take.
    pub(crate) fn forecast(&self, deployment: &Deployment) -> Forecast {
        let lengths = self.workload.lengths();
        let prompts = self.prompts.min(PROMPTS_FORECAST);
        // The prompts that were read stand for all. What only neighbours begin with is another text each time.
        let spans = spans(lengths);
        let all = (0..prompts).map(|prompt| {
            let (turn, length) = (prompt / lengths.len(), lengths[prompt % lengths.len()]);
            let Common { tokens, text, .. } = length.common;
            let everywhere = tokens == 0 || 2 * spans[&text].len() > lengths.len();
            let text = if everywhere { text } else { text.wrapping_add(turn as u64) };
            Length { common: Common { text, ..length.common }, ..length }
        });
        let all = all.collect();
        let all = Workload::new(&self.workload.name, all).expect("lengths that were valid");
        let mut forecast = forecast(deployment, &all, None);
        let scale = self.prompts as f64 / prompts as f64;
        forecast.seconds *= scale;
        forecast.tokens *= scale;
        forecast.tokens_shared *= scale;
        forecast
    }
}

/// From the first prompt that begins with a text to the last, by the text.
fn spans(lengths: &[Length]) -> HashMap<u64, Range<usize>> {
    let mut spans = HashMap::new();
    for (index, length) in lengths.iter().enumerate() {
        spans.entry(length.common.text).or_insert(index..index).end = index;
    }
    spans
}

/// The lengths of the prompts that were surveyed: a request with `n` choices is `n` prompts.
pub fn lengths(survey: &Survey) -> Vec<Length> {
    let prompts = survey.lengths.iter().flat_map(|request| {
        let (prompt, output) = (request.prompt_tokens as usize, request.output_tokens as usize);
        let Beginning { tokens, text } = request.beginning;
        (0..request.choices).map(move |choice| {
            let common = Common { tokens: tokens as usize, text, again: choice > 0 };
            Length { prompt, output, common }
        })
    });
    prompts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shared_makes_no_rows() {
        let check = |common: fn(usize) -> Common, input: usize| {
            let length = |prompt| Length { prompt: 1000, output: 32, common: common(prompt) };
            let workload = Workload::new("test", (0..10).map(length).collect()).expect("valid");
            assert_eq!(Expected { workload, prompts: 10 }.crowd().input, input);
        };
        check(|_| Common::default(), 1000);
        check(|_| Common { tokens: 960, text: 1, again: false }, 40);
        check(|_| Common { tokens: 1000, text: 1, again: false }, 1);
        // Ten choices of one request.
        check(|choice| Common { again: choice > 0, ..Common::default() }, 100);
    }

    #[test]
    fn short_prompts_that_begin_alike_want_small_pages() {
        let check = |prompt: usize, tokens: usize, output: usize, positions: u32| {
            let length = Length { prompt, output, common: Common { tokens, ..Common::default() } };
            let workload = Workload::new("test", vec![length; 10]).expect("valid");
            let crowd = Expected { workload, prompts: 10 }.crowd();
            assert_eq!(crowd.page_positions(), positions, "{prompt} {tokens} {output}");
        };
        check(1107, 1072, 16, 16);
        check(1107, 0, 16, 32);
        check(100, 0, 16, 32);
        check(512, 16, 16, 32);
        check(100, 16, 512, 32);
    }
}
