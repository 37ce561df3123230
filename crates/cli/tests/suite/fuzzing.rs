//! Runs the fuzz targets over their corpus and over seeded mutations of it: no input makes a reader of strangers' bytes
//! panic, hang, or take memory without measure. `GLINTHAWK_FUZZ_RUNS` asks for more than the few that fit every change.

#[path = "../../../../fuzz/targets.rs"]
#[allow(dead_code, reason = "the fuzzer uses targets by name")]
mod targets;

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::time::Instant;
use targets::{TARGETS, Target};

/// Mutations of each target in an ordinary run.
const RUNS: u64 = 500;

/// A small seeded generator (splitmix64), so that a failure can be repeated.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let bits = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((bits ^ (bits >> 31)) % limit.max(1) as u64) as usize
    }
}

/// Numbers near which arithmetic goes wrong.
const EDGES: [u64; 8] = [0, 1, 0x7f, 0xffff, 0xffff_ffff, 1 << 40, 1 << 63, u64::MAX];

/// Most changes go to the first bytes, where formats keep what can be lied about.
fn mutate(bytes: &mut Vec<u8>, others: &[Vec<u8>], random: &mut Random) {
    for _ in 0..1 + random.below(5) {
        let reach = if random.below(4) == 0 { bytes.len() } else { bytes.len().min(4096) };
        let at = random.below(reach);
        let length = 1 + random.below(32);
        let end = bytes.len().min(at + length);
        match random.below(9) {
            _ if bytes.is_empty() => bytes.push(random.below(256) as u8),
            0 => bytes[at] = random.below(256) as u8,
            1 => bytes[at] ^= 1 << random.below(8),
            2 => {
                let number = EDGES[random.below(EDGES.len())].to_le_bytes();
                let width = [1, 2, 4, 8][random.below(4)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&number[..width]);
            }
            3 => _ = bytes.drain(at..end),
            4 => {
                let piece = bytes[at..end].repeat(1 + random.below(40));
                bytes.splice(at..at, piece);
            }
            5 => bytes.truncate(at),
            6 => bytes[at] = b"0[]{}\",:-e%|()"[random.below(14)],
            7 => {
                let number = EDGES[random.below(EDGES.len())].to_string();
                bytes.splice(at..at, number.into_bytes());
            }
            _ => {
                let other = &others[random.below(others.len())];
                let from = random.below(other.len().min(4096));
                let until = other.len().min(from + length);
                bytes.splice(at..end, other[from..until].iter().copied());
            }
        }
    }
}

fn corpus(target: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let entries = fs::read_dir(&folder).expect("a corpus");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    paths.sort();
    paths.iter().map(|path| fs::read(path).expect("a file")).collect()
}

/// Runs a target; an input that makes it panic is kept.
fn check(name: &str, target: Target, input: &[u8], seed: u64) {
    let started = Instant::now();
    if catch_unwind(|| target(input)).is_err() {
        let kept = std::env::temp_dir().join(format!("glinthawk-fuzz-{name}-{seed}"));
        fs::write(&kept, input).expect("room for the input");
        panic!("{name} panics on {}", kept.display());
    }
    if started.elapsed().as_secs() > 3 {
        eprintln!("{name}: seed {seed} took {:?} for {} bytes", started.elapsed(), input.len());
    }
}

fn drive(name: &str) {
    let (_, target) = *TARGETS.iter().find(|(known, _)| *known == name).expect("a target");
    let corpus = corpus(name);
    for (seed, input) in (0..).zip(&corpus) {
        check(name, target, input, seed);
    }
    let asked = std::env::var("GLINTHAWK_FUZZ_RUNS").ok();
    let runs = asked.map_or(RUNS, |runs| runs.parse().expect("a number of runs"));
    let first =
        std::env::var("GLINTHAWK_FUZZ_SEED").map_or(0, |seed| seed.parse().expect("a seed"));
    for seed in first..first + runs {
        let mut random = Random(seed);
        let mut input = corpus[random.below(corpus.len())].clone();
        mutate(&mut input, &corpus, &mut random);
        check(name, target, &input, seed);
    }
    targets::clean(name);
    eprintln!("{name}: {} executions", corpus.len() as u64 + runs);
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test] fn $name() { drive(stringify!($name)); })*

        #[test]
        fn every_target_is_driven() {
            let driven = [$(stringify!($name)),*];
            assert!(TARGETS.iter().map(|(name, _)| *name).eq(driven));
        }
    };
}

targets!(frames handshake gguf safetensors config tokenizers requests templates plans);
