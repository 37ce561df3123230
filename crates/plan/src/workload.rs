//! Workloads: prompt and output lengths, what they mean for rows and context memory, and sampling from them.

use crate::error::{PlanError, read_text};
use crate::kernels::KernelTimes;
use crate::random::Random;
use std::path::Path;

/// Positions in a page; contexts are allocated in whole pages.
const PAGE_POSITIONS: f64 = glinthawk_protocol::PAGE_POSITIONS as f64;
/// More tokens than any model reads: a longer length is a mistake in the file.
const LENGTH_MAX: usize = 100_000_000;

/// One prompt's lengths in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Length {
    /// Input tokens, at least 1.
    pub prompt: usize,
    /// Generated tokens, at least 1.
    pub output: usize,
    /// What the input has in common with others'.
    pub common: Common,
}

/// What a prompt has in common with others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Common {
    /// Tokens that it begins with and others do too.
    pub tokens: usize,
    /// Names them.
    pub text: u64,
    /// Whether it is the prompt before it once more: another choice of one request.
    pub again: bool,
}

impl Length {
    /// Rows that pass through the layers: every token but the last generated one.
    pub fn rows(&self) -> usize {
        self.prompt + self.output - 1
    }

    /// Steps a prompt takes when `chunk` of its input tokens go in one step.
    pub fn steps(&self, chunk: usize) -> usize {
        self.prompt.div_ceil(chunk) + self.output - 1
    }
}

/// The prompts of a job, or a sample of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Where it came from.
    pub name: String,
    lengths: Vec<Length>,
    /// Rows of all prompts up to and including each: a row drawn at random falls on its prompt.
    rows_until: Vec<u64>,
}

/// How the rows of a job attend on average: some generate, one of each prompt, the others stand in prefill chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mixture {
    /// Share of the rows that stand in chunks.
    prefill_share: f64,
    /// Rows of a chunk.
    chunk_rows: f64,
    /// Positions of a chunk's prompt once the chunk is in.
    chunk_context: f64,
    /// Positions a generating row attends to.
    context: f64,
}

impl Mixture {
    /// Positions a row attends to on average.
    pub fn context_mean(&self) -> f64 {
        let prefill = self.chunk_context - (self.chunk_rows - 1.0) / 2.0;
        self.prefill_share * prefill + (1.0 - self.prefill_share) * self.context
    }

    /// Seconds of one layer's attention of `rows` rows; a part of a row takes that part of its time.
    pub fn attention_seconds(&self, kernels: &KernelTimes, rows: usize) -> f64 {
        let generating = rows as f64 * (1.0 - self.prefill_share);
        let (low, part) = (generating.floor(), generating.fract());
        let at = |rows: f64| kernels.attention_seconds(rows as usize, self.context);
        let chunks = rows as f64 * self.prefill_share / self.chunk_rows;
        let chunk = kernels.prefill_seconds(self.chunk_rows.round() as usize, self.chunk_context);
        at(low) * (1.0 - part) + at(low + 1.0) * part + chunks * chunk
    }
}

/// What of a workload a model's context cannot hold, as `run` treats it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Clipped {
    /// Prompts that fill a context by themselves: `run` answers them with an error line.
    pub refused: usize,
    /// Completions that end where the context does.
    pub shortened: usize,
}

impl Clipped {
    /// What was left out, in words; nothing where nothing was.
    pub fn words(&self, context_max: usize) -> Option<String> {
        let prompts = |count: usize| match count {
            1 => "1 prompt".to_owned(),
            count => format!("{count} prompts"),
        };
        let mut parts = Vec::new();
        if self.refused > 0 {
            parts.push(format!("{} too long to run", prompts(self.refused)));
        }
        if self.shortened > 0 {
            parts.push(format!("the completions of {} cut short", prompts(self.shortened)));
        }
        let parts = (!parts.is_empty()).then(|| parts.join(", "))?;
        Some(format!("the model's context has {context_max} tokens: {parts}"))
    }
}

/// Context that a seat holds at a random step, in tokens, whole pages.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Held {
    /// Mean.
    pub mean: f64,
    /// Standard deviation.
    pub deviation: f64,
    /// The most any prompt ever holds.
    pub most: f64,
}

impl Workload {
    /// A workload of these lengths; `name` is for messages.
    pub fn new(name: &str, lengths: Vec<Length>) -> Result<Self, PlanError> {
        if lengths.is_empty() {
            return Err(PlanError::field(name, "lengths", "the workload has no prompts"));
        }
        let mut rows_until = Vec::with_capacity(lengths.len());
        let mut total = 0u64;
        for (index, length) in lengths.iter().enumerate() {
            for (field, value) in
                [("prompt_tokens", length.prompt), ("output_tokens", length.output)]
            {
                if value == 0 || value > LENGTH_MAX {
                    let problem = format!("must be 1 to {LENGTH_MAX}, is {value}");
                    return Err(PlanError::field(
                        name,
                        format!("lengths[{index}].{field}"),
                        problem,
                    ));
                }
            }
            total += length.rows() as u64;
            rows_until.push(total);
        }
        Ok(Self { name: name.to_owned(), lengths, rows_until })
    }

    /// `count` prompts of the same lengths.
    pub fn uniform(prompt: usize, output: usize, count: usize) -> Result<Self, PlanError> {
        let length = Length { prompt, output, ..Length::default() };
        Self::new(&format!("{count} x {prompt}+{output}"), vec![length; count])
    }

    /// Reads a CSV of `prompt_tokens,output_tokens`.
    pub fn read_csv(path: &Path) -> Result<Self, PlanError> {
        Self::parse_csv(&path.display().to_string(), &read_text(path)?)
    }

    /// Parses a CSV of `prompt_tokens,output_tokens`; `path` is for messages.
    pub fn parse_csv(path: &str, text: &str) -> Result<Self, PlanError> {
        let mut lines = text.lines().enumerate();
        if text.trim().is_empty() {
            return Err(line_error(path, 1, "prompt_tokens", "the file is empty"));
        }
        let header = lines.next().map_or("", |(_, line)| line.trim());
        if header != "prompt_tokens,output_tokens" {
            return Err(line_error(path, 1, "header", "must be prompt_tokens,output_tokens"));
        }
        let mut lengths = Vec::new();
        for (index, line) in lines.filter(|(_, line)| !line.trim().is_empty()) {
            let number = index + 1;
            let mut fields = line.split(',');
            let mut next = |field: &str| -> Result<usize, PlanError> {
                let text = fields
                    .next()
                    .ok_or_else(|| line_error(path, number, field, "is missing"))?
                    .trim();
                let value = text.parse().map_err(|_| {
                    line_error(path, number, field, &format!("`{text}` is not a whole number"))
                })?;
                if value > LENGTH_MAX {
                    return Err(line_error(
                        path,
                        number,
                        field,
                        &format!("{value} is above {LENGTH_MAX}"),
                    ));
                }
                Ok(value)
            };
            // Traces hold requests without an answer; a prompt that generates nothing still takes one step.
            let (prompt, output) = (next("prompt_tokens")?.max(1), next("output_tokens")?.max(1));
            lengths.push(Length { prompt, output, ..Length::default() });
        }
        if lengths.is_empty() {
            return Err(line_error(path, 2, "prompt_tokens", "the file has no prompts"));
        }
        Self::new(path, lengths)
    }

    /// The workload as a model of `context_max` positions runs it.
    pub fn within(&self, context_max: usize) -> Result<(Self, Clipped), PlanError> {
        let mut clipped = Clipped::default();
        let mut lengths = Vec::with_capacity(self.lengths.len());
        for &length in &self.lengths {
            let Length { prompt, output, .. } = length;
            let Some(room) = context_max.checked_sub(prompt).filter(|room| *room > 0) else {
                clipped.refused += 1;
                continue;
            };
            clipped.shortened += usize::from(output > room);
            lengths.push(Length { output: output.min(room), ..length });
        }
        if lengths.is_empty() {
            let problem = format!("every prompt is longer than the model's {context_max} tokens");
            return Err(PlanError::field(&self.name, "prompt_tokens", problem));
        }
        Ok((Self::new(&self.name, lengths)?, clipped))
    }

    /// The workload with only what each prompt computes for itself: no job of it takes longer than the whole.
    pub(crate) fn computed(&self) -> Self {
        let own = |length: &Length| {
            let Length { prompt, output, common } = *length;
            let prompt = if common.again { 1 } else { prompt - common.tokens.min(prompt - 1) };
            Length { prompt, output, ..Length::default() }
        };
        let lengths = self.lengths.iter().map(own).collect();
        Self::new(&self.name, lengths).expect("lengths that were valid")
    }

    /// The workload as if its prompts had nothing in common.
    pub fn unshared(&self) -> Self {
        let alone = |length: &Length| Length { common: Common::default(), ..*length };
        Self { lengths: self.lengths.iter().map(alone).collect(), ..self.clone() }
    }

    /// How rows attend on average when input goes in chunks.
    pub fn mixture(&self, chunk: usize) -> Mixture {
        let (mut chunks, mut prefill, mut chunk_positions) = (0.0, 0.0, 0.0);
        let (mut generating, mut positions) = (0.0, 0.0);
        for length in &self.lengths {
            let (prompt, whole) = (length.prompt as f64, length.prompt / chunk);
            let rest = (length.prompt % chunk) as f64;
            chunks += length.prompt.div_ceil(chunk) as f64;
            prefill += prompt;
            // Weighed by rows: chunks end after 1, 2, … times `chunk` positions, the last one with the prompt.
            let (rows, whole) = (chunk as f64, whole as f64);
            chunk_positions += rows * rows * whole * (whole + 1.0) / 2.0 + rest * prompt;
            let (first, last) = (prompt + 1.0, length.rows() as f64);
            generating += last - prompt;
            positions += (first + last) / 2.0 * (last - prompt);
        }
        Mixture {
            prefill_share: prefill / (prefill + generating),
            chunk_rows: prefill / chunks,
            chunk_context: chunk_positions / prefill,
            context: if generating > 0.0 { positions / generating } else { 1.0 },
        }
    }

    /// The prompts' lengths.
    pub fn lengths(&self) -> &[Length] {
        &self.lengths
    }

    /// Rows of all prompts.
    pub fn rows(&self) -> f64 {
        *self.rows_until.last().expect("a workload has prompts") as f64
    }

    /// Generated tokens of all prompts.
    pub fn generated(&self) -> f64 {
        self.lengths.iter().map(|length| length.output as f64).sum()
    }

    /// Rows a seat contributes to a step on average when input goes in chunks.
    pub fn rows_per_seat(&self, chunk: usize) -> f64 {
        self.rows() / self.lengths.iter().map(|length| length.steps(chunk) as f64).sum::<f64>()
    }

    /// The most steps any prompt takes.
    pub fn steps_max(&self, chunk: usize) -> usize {
        self.lengths.iter().map(|length| length.steps(chunk)).max().expect("a workload has prompts")
    }

    /// Positions a row attends to on average: Σ R(R+1)/2 / Σ R.
    pub fn context_mean(&self) -> f64 {
        let attended = |length: &Length| {
            let rows = length.rows() as f64;
            rows * (rows + 1.0) / 2.0
        };
        self.lengths.iter().map(attended).sum::<f64>() / self.rows()
    }

    /// Context a seat holds at a random step when input goes in chunks.
    pub fn held(&self, chunk: usize) -> Held {
        let (mut steps, mut sum, mut squares, mut most) = (0.0, 0.0, 0.0, 0.0f64);
        for length in &self.lengths {
            let mut add = |tokens: usize| {
                let pages = (tokens as f64 / PAGE_POSITIONS).ceil() * PAGE_POSITIONS;
                (steps, sum, squares, most) =
                    (steps + 1.0, sum + pages, squares + pages * pages, most.max(pages));
            };
            (1..=length.prompt.div_ceil(chunk))
                .for_each(|step| add((step * chunk).min(length.prompt)));
            (length.prompt + 1..=length.rows()).for_each(&mut add);
        }
        let mean = sum / steps;
        Held { mean, deviation: (squares / steps - mean * mean).max(0.0).sqrt(), most }
    }

    /// Positions attended to by one row drawn at random.
    pub fn draw_context(&self, random: &mut Random) -> f64 {
        let row = random.below(*self.rows_until.last().expect("a workload has prompts"));
        let prompt = self.rows_until.partition_point(|&until| until <= row);
        let before = if prompt == 0 { 0 } else { self.rows_until[prompt - 1] };
        (row - before + 1) as f64
    }
}

fn line_error(path: &str, line: usize, field: &str, problem: &str) -> PlanError {
    PlanError::Line {
        path: path.to_owned(),
        line,
        field: field.to_owned(),
        problem: problem.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_of_one_prompt() {
        let workload = Workload::uniform(3, 2, 1).expect("valid");
        assert_eq!(workload.rows(), 4.0);
        assert_eq!(workload.context_mean(), 2.5);
        assert_eq!(workload.rows_per_seat(1), 1.0);
        // Chunks of 4: the input in one step, one more row in another.
        assert_eq!(workload.rows_per_seat(4), 2.0);
        assert_eq!(workload.held(1), Held { mean: 32.0, deviation: 0.0, most: 32.0 });
    }

    #[test]
    fn drawn_contexts_average_to_the_mean() {
        let length = |prompt, output| Length { prompt, output, ..Length::default() };
        let workload = Workload::new("test", vec![length(10, 5), length(200, 100)]).expect("valid");
        let mut random = Random::new(7);
        let mean = (0..20_000).map(|_| workload.draw_context(&mut random)).sum::<f64>() / 20_000.0;
        assert!(
            (mean / workload.context_mean() - 1.0).abs() < 0.02,
            "{mean} against {}",
            workload.context_mean()
        );
    }

    #[test]
    fn a_mixture_attends_to_what_the_workload_does() {
        for (prompt, output, chunk) in [(3, 2, 4), (100, 1, 16), (1, 50, 16), (1000, 300, 256)] {
            let workload = Workload::uniform(prompt, output, 5).expect("valid");
            let (mean, mixed) = (workload.context_mean(), workload.mixture(chunk).context_mean());
            assert!((mixed / mean - 1.0).abs() < 0.05, "{prompt}+{output}: {mixed} for {mean}");
        }
    }

    #[test]
    fn lengths_beyond_the_context_are_cut_as_run_cuts_them() {
        let lengths = [(10, 900_000), (4096, 5), (4095, 5), (20, 30)];
        let length = |(prompt, output)| Length { prompt, output, ..Length::default() };
        let lengths = lengths.map(length).to_vec();
        let workload = Workload::new("w", lengths).expect("valid");
        let (within, clipped) = workload.within(4096).expect("some fit");
        let outputs: Vec<usize> = within.lengths().iter().map(|length| length.output).collect();
        assert_eq!(outputs, [4086, 1, 30]);
        assert_eq!(
            clipped.words(4096).expect("something was cut"),
            "the model's context has 4096 tokens: 1 prompt too long to run, the completions of 2 prompts cut short"
        );
        assert_eq!(within.within(4096).expect("all fit").1.words(4096), None);
        let error = workload.within(10).unwrap_err().to_string();
        assert!(error.contains("every prompt is longer than the model's 10 tokens"), "{error}");
    }

    #[test]
    fn bad_csv_names_line_and_field() {
        let cases = [
            ("", "w.csv:1: prompt_tokens: the file is empty"),
            ("\n \n", "w.csv:1: prompt_tokens: the file is empty"),
            ("a,b\n", "w.csv:1: header: must be prompt_tokens,output_tokens"),
            ("prompt_tokens,output_tokens\n", "w.csv:2: prompt_tokens: the file has no prompts"),
            ("prompt_tokens,output_tokens\n3,4\n5\n", "w.csv:3: output_tokens: is missing"),
            (
                "prompt_tokens,output_tokens\nx,4\n",
                "w.csv:2: prompt_tokens: `x` is not a whole number",
            ),
            (
                "prompt_tokens,output_tokens\n3,-4\n",
                "w.csv:2: output_tokens: `-4` is not a whole number",
            ),
            (
                "prompt_tokens,output_tokens\n3,999999999\n",
                "w.csv:2: output_tokens: 999999999 is above 100000000",
            ),
        ];
        for (text, expected) in cases {
            assert_eq!(Workload::parse_csv("w.csv", text).unwrap_err().to_string(), expected);
        }
    }
}
