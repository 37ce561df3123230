//! The key that names an output line. It derives from the request and from everything else that
//! decides the result's bytes, so that a resumed job recognises its own lines by their `id` alone.

use crate::digest::hash;
use std::fmt;

/// Changes when the bytes written for the same request change.
const FORMAT: &[u8] = b"glinthawk-output-3";
const PREFIX: &str = "batch_req_";

/// Names one output line; two lines of one input never share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(u128);

/// What a run adds to every request's key: results of another model or limit are not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RunDigest([u8; 32]);

impl RunDigest {
    /// Of everything outside a request that decides its result's bytes.
    pub(crate) fn new(model: &str, identity: &str, context_max: u32) -> Self {
        let context = context_max.to_le_bytes();
        Self(hash(&[FORMAT, model.as_bytes(), identity.as_bytes(), &context]))
    }
}

impl Key {
    /// Of a line that is the first to use its custom id.
    pub(crate) fn of_request(run: RunDigest, custom_id: &str, request: &[u8; 32]) -> Self {
        Self::from_hash(hash(&[b"request", &run.0, custom_id.as_bytes(), request]))
    }

    /// Of a line whose custom id an earlier line has taken; the number tells duplicates apart.
    pub(crate) fn of_duplicate(custom_id: &str, line: u64) -> Self {
        Self::from_hash(hash(&[b"duplicate", FORMAT, custom_id.as_bytes(), &line.to_le_bytes()]))
    }

    /// Of a custom id alone, for finding duplicates without keeping the ids.
    pub(crate) fn of_custom_id(custom_id: &str) -> Self {
        Self::from_hash(hash(&[b"custom_id", custom_id.as_bytes()]))
    }

    fn from_hash(hash: [u8; 32]) -> Self {
        let (first, _) = hash.split_at(16);
        Self(u128::from_be_bytes(first.try_into().expect("16 bytes")))
    }

    /// The output line's `id`.
    pub(crate) fn batch_id(self) -> String {
        format!("{PREFIX}{self}")
    }

    /// The key in an output line's `id`, or nothing where it is not one of ours.
    pub(crate) fn from_batch_id(id: &str) -> Option<Self> {
        let digits = id.strip_prefix(PREFIX)?;
        let ours = digits.len() == 32
            && digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if ours { u128::from_str_radix(digits, 16).ok().map(Self) } else { None }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

/// The seed of a request that names none: the same request samples the same tokens in every run.
pub(crate) fn seed_of_request(custom_id: &str, request: &[u8; 32]) -> u64 {
    seed_from(hash(&[b"seed", custom_id.as_bytes(), request]))
}

/// The seed of one of a request's choices; the first has the request's own.
pub(crate) fn seed_of_choice(seed: u64, choice: u32) -> u64 {
    match choice {
        0 => seed,
        _ => seed_from(hash(&[b"choice", &seed.to_le_bytes(), &choice.to_le_bytes()])),
    }
}

fn seed_from(hash: [u8; 32]) -> u64 {
    let (first, _) = hash.split_at(8);
    u64::from_le_bytes(first.try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_id_gives_back_its_key() {
        let run = RunDigest::new("m", "", 128);
        let key = Key::of_request(run, "a", &[7; 32]);
        assert_eq!(Key::from_batch_id(&key.batch_id()), Some(key));
        for foreign in [
            "",
            "batch_req_",
            "batch_req_12",
            "req_0",
            "batch_req_+0000000000000000000000000000000",
        ] {
            assert_eq!(Key::from_batch_id(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn everything_that_changes_a_result_changes_the_key() {
        let run = RunDigest::new("m", "", 128);
        let key = Key::of_request(run, "a", &[7; 32]);
        assert_ne!(key, Key::of_request(run, "b", &[7; 32]));
        assert_ne!(key, Key::of_request(run, "a", &[8; 32]));
        assert_ne!(key, Key::of_request(RunDigest::new("n", "", 128), "a", &[7; 32]));
        assert_ne!(key, Key::of_request(RunDigest::new("m", "x", 128), "a", &[7; 32]));
        assert_ne!(key, Key::of_request(RunDigest::new("m", "", 129), "a", &[7; 32]));
        assert_ne!(Key::of_duplicate("a", 2), Key::of_duplicate("a", 3));
    }
}
