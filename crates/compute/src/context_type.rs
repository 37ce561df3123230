//! How keys and values are stored, and how a position becomes int8.

use crate::ComputeError;
use half::bf16;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ContextType {
    /// As they arrive.
    #[default]
    Bf16,
    /// Eight bits each, and an f32 scale for each position, head, and keys or values.
    Int8,
}

impl ContextType {
    pub(crate) const ALL: [ContextType; 2] = [ContextType::Bf16, ContextType::Int8];

    /// The type's name, as options and statistics spell it.
    pub fn name(self) -> &'static str {
        match self {
            ContextType::Bf16 => "bf16",
            ContextType::Int8 => "int8",
        }
    }

    /// Bytes of `positions` positions of one head, keys and values.
    pub(crate) fn head_bytes(self, head_dim: usize, positions: usize) -> usize {
        let position = match self {
            ContextType::Bf16 => head_dim * size_of::<bf16>(),
            ContextType::Int8 => head_dim + size_of::<f32>(),
        };
        2 * positions * position
    }
}

impl fmt::Display for ContextType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for ContextType {
    type Err = ComputeError;

    fn from_str(name: &str) -> Result<Self, ComputeError> {
        let known = Self::ALL.into_iter().find(|known| known.name().eq_ignore_ascii_case(name));
        known.ok_or_else(|| ComputeError::ContextTypeUnknown { name: name.to_owned() })
    }
}

const SIGN_BIT: u16 = 0x8000;

/// Makes one position's keys or values of one head int8: values ≈ scale · codes, where
/// scale = max |value| / 127, which is returned, and code = value / scale, ties to even.
///
/// Each position has its own scale, so that a row's bits depend on the row alone. A scale for a
/// whole page would grow as positions are added, and a row would see other numbers if later rows of
/// its chunk are already stored.
///
/// A value that is not finite makes the scale not finite, and every row that sees the position NaN.
#[inline(always)]
pub(crate) fn quantise(values: &[bf16], codes: &mut [i8]) -> f32 {
    let wide = |bits: u16| f32::from_bits(u32::from(bits) << 16);
    // Without the sign, the bits of floats have the same order as their values, with NaN on top.
    let largest = values.iter().fold(0, |most, value| (value.to_bits() & !SIGN_BIT).max(most));
    let scale = wide(largest) / 127.0;
    let divisor = if scale == 0.0 { 1.0 } else { scale };
    for (code, value) in codes.iter_mut().zip(values) {
        *code = (wide(value.to_bits()) / divisor).round_ties_even() as i32 as i8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(values: &[f32], scale: f32, codes: &[i8]) {
        let values: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
        let mut found = vec![99; values.len()];
        assert_eq!(quantise(&values, &mut found), scale, "{values:?}");
        assert_eq!(found, codes, "{values:?}");
    }

    #[test]
    fn the_largest_becomes_127_and_ties_go_to_even() {
        check(&[127.0, 0.5, 1.5, 2.5, -2.5, -3.5, 0.25], 1.0, &[127, 0, 2, 2, -2, -4, 0]);
        check(&[-254.0, 3.0, 254.0], 2.0, &[-127, 2, 127]);
        check(&[0.0, -0.0], 0.0, &[0, 0]);
    }

    #[test]
    fn every_size_of_number_is_off_by_half_a_step_at_most() {
        for exponent in -126..=126 {
            let size = (exponent as f32).exp2();
            let values: Vec<bf16> =
                (-60..=60).map(|value| bf16::from_f32(value as f32 * 0.031 * size)).collect();
            let mut codes = vec![0; values.len()];
            let scale = quantise(&values, &mut codes);
            for (value, code) in values.iter().zip(codes) {
                let error = (value.to_f32() - scale * f32::from(code)).abs();
                assert!(error <= 0.5001 * scale, "{value} became {code} · {scale}");
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let scale = quantise(&[bf16::ONE, bf16::from_f32(value)], &mut [0; 2]);
            assert!(!scale.is_finite());
        }
    }

    #[test]
    fn names_are_read_back() {
        for kind in ContextType::ALL {
            assert_eq!(kind.name().parse::<ContextType>().unwrap(), kind);
        }
        assert!("int4".parse::<ContextType>().is_err());
    }
}
