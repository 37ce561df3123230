//! Rotary embedding: cosines and sines of every position seen so far, and the rotation itself.
//!
//! Pair (i, i + d/2) of a head at position p turns by the angle p · frequency[i].

use glinthawk_model::ModelConfig;

/// Positions are added this many at a time.
const GROWTH_POSITIONS: usize = 256;

/// The table of angles; grows with the longest context seen.
pub(crate) struct Rope {
    frequencies: Vec<f32>,
    magnitude: f32,
    /// (positions, 2, head_dim / 2): cosines, then sines, of one position.
    table: Vec<f32>,
}

impl Rope {
    pub(crate) fn new(config: &ModelConfig) -> Self {
        assert_eq!(config.rope_frequencies.len() * 2, config.head_dim, "one frequency per pair");
        Self {
            frequencies: config.rope_frequencies.clone(),
            magnitude: config.rope_magnitude,
            table: Vec::new(),
        }
    }

    /// Makes the table reach `position`.
    pub(crate) fn reach(&mut self, position: u32) {
        let width = 2 * self.frequencies.len();
        let known = self.table.len() / width;
        let wanted = position as usize + 1;
        if wanted <= known {
            return;
        }
        let wanted = wanted.next_multiple_of(GROWTH_POSITIONS);
        for position in known..wanted {
            let angle = |frequency: &f32| f64::from(position as f32 * frequency);
            let scale = |value: f64| value as f32 * self.magnitude;
            self.table
                .extend(self.frequencies.iter().map(|frequency| scale(angle(frequency).cos())));
            self.table
                .extend(self.frequencies.iter().map(|frequency| scale(angle(frequency).sin())));
        }
    }

    /// Cosines, then sines, of a position reached before.
    pub(crate) fn angles(&self, position: u32) -> &[f32] {
        let width = 2 * self.frequencies.len();
        &self.table[width * position as usize..][..width]
    }
}

/// Rotates one head in place by its angles: cosines, then sines.
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32], angles: &[f32]) {
    let (low, high) = head.split_at_mut(angles.len() / 2);
    let (cosines, sines) = angles.split_at(angles.len() / 2);
    for (((low, high), cosine), sine) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
        let (a, b) = (*low, *high);
        *low = a * cosine - b * sine;
        *high = b * cosine + a * sine;
    }
}
