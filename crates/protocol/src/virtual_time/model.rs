//! The simulated model: hashes in place of matrix products, with the data flow of a transformer.

use crate::prompt::{Finish, Prompt};
use glinthawk_flight::Sample;

/// Tokens of the simulated vocabulary; token 0 plays the end of text.
pub const VOCAB: u64 = 61;

/// A well-mixed number from two.
pub fn mix(left: u64, right: u64) -> u64 {
    let mut value = left.rotate_left(23) ^ right.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    value = (value ^ (value >> 29)).wrapping_mul(0xa076_1d64_78bd_642f);
    value ^ (value >> 32)
}

/// The residual of a token.
pub(super) fn embed(token: u32) -> u64 {
    mix(1, u64::from(token))
}

/// Attention over the stored values of positions `0..=position`.
pub(super) fn attend(stored: impl Iterator<Item = u64>) -> u64 {
    stored.fold(2, mix)
}

/// The residual after a layer.
pub(super) fn post(residual: u64, attended: u64, layer: u32) -> u64 {
    mix(mix(residual, attended), u64::from(layer))
}

/// The token picked from a residual. Half of all tokens are the same, so that some can be guessed.
pub(super) fn pick(residual: u64, sample: &Sample) -> u32 {
    pick_at(residual, sample.sampling.seed, sample.position)
}

fn pick_at(residual: u64, seed: u64, position: u32) -> u32 {
    const USUAL: u32 = 3;
    let number = mix(mix(residual, seed), u64::from(position));
    if number.is_multiple_of(2) { USUAL } else { (number / 2 % VOCAB) as u32 }
}

/// What a prompt must complete to, computed without any cluster.
pub fn complete(prompt: &Prompt, layers: u32, context_max: u32) -> (Vec<u32>, Finish) {
    let mut stored: Vec<Vec<u64>> = vec![Vec::new(); layers as usize];
    let mut residual = 0;
    let mut forward = |token: u32| {
        residual = embed(token);
        for (layer, stored) in stored.iter_mut().enumerate() {
            stored.push(residual);
            residual = post(residual, attend(stored.iter().copied()), layer as u32);
        }
        residual
    };
    let mut last = 0;
    for &token in &prompt.tokens {
        last = forward(token);
    }
    let given = prompt.tokens.len() as u32;
    let tokens_max = prompt.tokens_max.min(context_max - given);
    let mut tokens = Vec::new();
    loop {
        let position = given + tokens.len() as u32;
        let token = pick_at(last, prompt.sampling.seed, position);
        tokens.push(token);
        if prompt.stop_ids.contains(&token) {
            return (tokens, Finish::Stop);
        }
        if tokens.len() as u32 == tokens_max {
            return (tokens, Finish::Length);
        }
        last = forward(token);
    }
}
