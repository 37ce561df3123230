//! A small seeded generator (SplitMix64), so that a simulation is the same everywhere.

/// A stream of numbers that depends on the seed alone.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A stream from a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number in 0..limit.
    pub fn below(&mut self, limit: u64) -> u64 {
        assert!(limit > 0, "an empty range has no numbers");
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// A number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Scrambles 64 bits; a stateless draw for a key such as (seed, flight, node).
pub fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}
