//! A prompt inside the dispatcher: its tokens, what is computed, and the context it holds.

use super::Rank;
use super::drafts::DRAFTS_MAX;
use super::pages::BEGINNING;
use crate::prompt::{Biases, Completion, Finish, Prompt, PromptId};
use glinthawk_flight::{Generated, Row, Sample, ShardId, TOKEN_NONE, TOKEN_PENDING};
use std::collections::BTreeMap;

/// Where a seated prompt's context lives.
pub(super) struct Seat {
    pub shard: ShardId,
    pub slot: u32,
    /// Its pages, in order.
    pub pages: Vec<u32>,
    /// Positions whose keys and values are stored.
    pub computed: u32,
    /// Pages from the first on that are shared or were published, and the name of the last of them.
    pub published: u32,
    pub published_name: u64,
    /// Pages that the nodes have in their tables.
    pub told: u32,
    /// Rows in the air; 0 when the prompt is home.
    pub rows_in_air: u32,
    /// Tokens that may come next. The last rows in the air are theirs.
    pub drafts: Vec<u32>,
    /// Tokens that steps in the air will pick.
    pub tokens_in_air: u32,
}

impl Seat {
    pub(super) fn new(shard: ShardId, slot: u32) -> Self {
        Self {
            shard,
            slot,
            pages: Vec::new(),
            computed: 0,
            published: 0,
            published_name: BEGINNING,
            told: 0,
            rows_in_air: 0,
            drafts: Vec::new(),
            tokens_in_air: 0,
        }
    }
}

pub(super) struct Entry {
    id: PromptId,
    pub prompt: Prompt,
    /// A hash of the input up to the end of each full page; empty if pages are not shared.
    pub hashes: Vec<u64>,
    /// Input tokens that were found on other prompts' pages.
    pub shared: u32,
    /// Positions that were computed at some time.
    pub reached: u32,
    /// Tokens of the prompt that were computed, once or again after a preemption.
    pub prefilled: u32,
    pub generated: Vec<Generated>,
    /// How often each token was generated; kept only if a penalty needs it.
    counts: BTreeMap<u32, u32>,
    pub seat: Option<Seat>,
    /// The watcher wants the completion to end after this many tokens.
    pub stop_after: Option<usize>,
    /// Why the completion is over, and since when, while rows that were launched ahead are in the air.
    pub over: Option<(Finish, u64)>,
    pub submitted_ns: u64,
    pub first_token_ns: Option<u64>,
}

impl Entry {
    pub(super) fn new(id: PromptId, prompt: Prompt, hashes: Vec<u64>, now_ns: u64) -> Self {
        Self {
            id,
            prompt,
            hashes,
            shared: 0,
            reached: 0,
            prefilled: 0,
            generated: Vec::new(),
            counts: BTreeMap::new(),
            seat: None,
            stop_after: None,
            over: None,
            submitted_ns: now_ns,
            first_token_ns: None,
        }
    }

    /// Whose turn it is before whose.
    pub(super) fn rank(&self) -> Rank {
        (self.prompt.priority, self.id)
    }

    /// Tokens known so far, given and generated.
    pub(super) fn len(&self) -> u32 {
        (self.prompt.tokens.len() + self.generated.len()) as u32
    }

    fn token(&self, position: u32) -> u32 {
        let position = position as usize;
        let given = self.prompt.tokens.len();
        let drafts = self.seat.as_ref().map_or(&[][..], |seat| &seat.drafts);
        if position < given {
            self.prompt.tokens[position]
        } else if let Some(generated) = self.generated.get(position - given) {
            generated.token
        } else {
            let ahead = position - given - self.generated.len();
            drafts.get(ahead).copied().unwrap_or(TOKEN_PENDING)
        }
    }

    /// The last tokens before a position, up to `count` of them.
    pub(super) fn tokens_before(&self, position: u32, count: usize) -> Vec<u32> {
        (position.saturating_sub(count as u32)..position).map(|place| self.token(place)).collect()
    }

    /// Drafts that the next step has room for at most. Who looks back at its tokens has none: each is picked by those
    /// before it.
    pub(super) fn drafts_max(&self) -> u32 {
        if self.looks_back() || self.rows_wanted() != 1 || self.generated.is_empty() {
            return 0;
        }
        (self.prompt.tokens_max - self.generated.len() as u32 - 1).min(DRAFTS_MAX as u32)
    }

    /// Whether how a token is picked depends on the tokens before it.
    pub(super) fn looks_back(&self) -> bool {
        let Prompt { sampling, biases, .. } = &self.prompt;
        sampling.repetition_penalty != 1.0
            || biases.presence_penalty != 0.0
            || biases.frequency_penalty != 0.0
    }

    /// Rows to compute before the next token, beyond those in the air.
    pub(super) fn rows_wanted(&self) -> u32 {
        let seat = self.seat.as_ref().expect("seated");
        let generated = self.generated.len() as u32 + seat.tokens_in_air;
        if self.over.is_some() || self.stop_after.is_some() || generated >= self.prompt.tokens_max {
            return 0;
        }
        self.prompt.tokens.len() as u32 + generated - seat.computed - seat.rows_in_air
    }

    /// How many of the tokens that a step picked count: the first, and one after every draft that was right, up to the
    /// completion's end. A watcher may end it before the last of several, so in a watched prompt that one waits for a step
    /// of its own.
    pub(super) fn kept(&self, drafts: &[u32], picked: &[Generated]) -> usize {
        if drafts.is_empty() {
            return picked.len();
        }
        let right = drafts.iter().zip(picked).take_while(|(draft, picked)| **draft == picked.token);
        let picked = &picked[..right.count() + 1];
        let ends = |(index, picked): (usize, &Generated)| {
            let generated = self.generated.len() + index + 1;
            picked.token == TOKEN_NONE
                || self.prompt.stop_ids.contains(&picked.token)
                || generated >= self.prompt.tokens_max as usize
        };
        match picked.iter().enumerate().position(ends) {
            _ if self.stop_after.is_some() => 1,
            Some(last) if self.prompt.watched => last.max(1),
            Some(last) => last + 1,
            None => picked.len(),
        }
    }

    /// Appends a generated token; says whether and why the completion is over.
    pub(super) fn push(&mut self, generated: Generated, now_ns: u64) -> Option<Finish> {
        let token = generated.token;
        if self.prompt.biases.presence_penalty != 0.0 || self.prompt.biases.frequency_penalty != 0.0
        {
            *self.counts.entry(token).or_default() += 1;
        }
        self.generated.push(generated);
        self.first_token_ns.get_or_insert(now_ns);
        if self.prompt.stop_ids.contains(&token) {
            Some(Finish::Stop)
        } else if self.generated.len() >= self.prompt.tokens_max as usize {
            Some(Finish::Length)
        } else {
            None
        }
    }

    /// The last `count` rows in the air, which the seat's pages already hold.
    pub(super) fn rows(&self, count: u32, page_positions: u32) -> impl Iterator<Item = Row> {
        let seat = self.seat.as_ref().expect("only a seated prompt has rows");
        let end = seat.computed + seat.rows_in_air;
        (end - count..end).map(move |position| Row {
            slot: seat.slot,
            position,
            page: seat.pages[(position / page_positions) as usize],
            token: self.token(position),
        })
    }

    /// The pages that the nodes must enter into their tables before the last `count` rows in the air. If others were
    /// launched before those, they told of them.
    pub(super) fn untold(&self, count: u32, page_positions: u32) -> impl Iterator<Item = Row> {
        let seat = self.seat.as_ref().expect("only a seated prompt has pages");
        let first = if seat.rows_in_air == count { seat.told } else { u32::MAX };
        (first..seat.computed / page_positions).map(move |number| Row {
            slot: seat.slot,
            position: number * page_positions,
            page: seat.pages[number as usize],
            token: 0,
        })
    }

    /// How the last `count` tokens in the air are picked, the first of them from row `row` of the launch.
    pub(super) fn samples(&self, count: u32, row: u32) -> impl Iterator<Item = Sample> {
        let tokens_in_air = self.seat.as_ref().map_or(0, |seat| seat.tokens_in_air);
        let position = self.len() + tokens_in_air - count;
        (0..count).map(move |number| Sample {
            row: row + number,
            position: position + number,
            sampling: self.prompt.sampling.clone(),
            repeated: self.repeated(),
            biases: self.biases(),
        })
    }

    fn repeated(&self) -> Vec<u32> {
        if self.prompt.sampling.repetition_penalty == 1.0 {
            return Vec::new();
        }
        let generated = self.generated.iter().map(|generated| generated.token);
        let mut tokens: Vec<u32> = self.prompt.tokens.iter().copied().chain(generated).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    fn biases(&self) -> Vec<(u32, f32)> {
        let Biases { presence_penalty, frequency_penalty, logit_bias } = &self.prompt.biases;
        if self.counts.is_empty() {
            return logit_bias.clone();
        }
        let mut biases: BTreeMap<u32, f32> = logit_bias.iter().copied().collect();
        for (&token, &count) in &self.counts {
            let penalty = presence_penalty + frequency_penalty * count as f32;
            *biases.entry(token).or_default() -= penalty;
        }
        biases.into_iter().collect()
    }

    pub(super) fn complete(mut self, finish: Finish) -> Completion {
        if let Some(kept) = self.stop_after {
            self.generated.truncate(kept);
        }
        Completion { id: self.id, tokens: self.generated, finish, shared: self.shared }
    }
}
