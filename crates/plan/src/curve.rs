//! Measured seconds over batches and contexts, and linear interpolation in them.

use crate::error::PlanError;
use serde::{Deserialize, Serialize};

/// One timed batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Rows.
    pub batch: usize,
    /// Mean seconds of one layer's stage.
    pub seconds: f64,
    /// Half the distance between the first and the third quartile, in seconds.
    pub spread: f64,
}

/// One stage over batches, ascending.
pub type Curve = Vec<Point>;

/// Attention at one context length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttentionCurve {
    /// Positions each row attends to.
    pub context: usize,
    /// Seconds over batches.
    pub points: Curve,
}

pub(crate) fn check_attention(
    path: &str,
    name: &str,
    curves: &[AttentionCurve],
) -> Result<(), PlanError> {
    for (index, curve) in curves.iter().enumerate() {
        let field = format!("{name}[{index}]");
        if curve.context == 0 || (index > 0 && curve.context <= curves[index - 1].context) {
            return Err(PlanError::field(
                path,
                format!("{field}.context"),
                "must be above 0 and ascend",
            ));
        }
        check_curve(path, &format!("{field}.points"), &curve.points)?;
    }
    Ok(())
}

/// Seconds at `rows` rows and `context` positions, linear in both.
pub(crate) fn seconds_at(curves: &[AttentionCurve], rows: usize, context: f64) -> f64 {
    if rows == 0 {
        return 0.0;
    }
    if curves.len() == 1 {
        return interpolate(&curves[0].points, rows) * context / curves[0].context as f64;
    }
    let above =
        curves.partition_point(|curve| (curve.context as f64) < context).clamp(1, curves.len() - 1);
    let (low, high) = (&curves[above - 1], &curves[above]);
    let (at_low, at_high) = (interpolate(&low.points, rows), interpolate(&high.points, rows));
    let part = (context - low.context as f64) / (high.context - low.context) as f64;
    (at_low + (at_high - at_low) * part).max(0.0)
}

pub(crate) fn check_curve(path: &str, name: &str, curve: &Curve) -> Result<(), PlanError> {
    if curve.is_empty() {
        return Err(PlanError::field(path, name, "has no points"));
    }
    for (index, point) in curve.iter().enumerate() {
        let field = |part: &str| format!("{name}[{index}].{part}");
        if point.batch == 0 || (index > 0 && point.batch <= curve[index - 1].batch) {
            return Err(PlanError::field(path, field("batch"), "must be above 0 and ascend"));
        }
        if !(point.seconds.is_finite() && point.seconds > 0.0) {
            return Err(PlanError::field(
                path,
                field("seconds"),
                format!("must be above 0, is {}", point.seconds),
            ));
        }
        if !(point.spread.is_finite() && point.spread >= 0.0) {
            return Err(PlanError::field(
                path,
                field("spread"),
                format!("must not be negative, is {}", point.spread),
            ));
        }
    }
    Ok(())
}

/// Seconds at `rows`, linear between the measured batches and along the outermost pair beyond them.
pub fn interpolate(curve: &[Point], rows: usize) -> f64 {
    if rows == 0 {
        return 0.0;
    }
    if curve.len() == 1 {
        return curve[0].seconds * (rows as f64 / curve[0].batch as f64).max(1.0);
    }
    let above = curve.partition_point(|point| point.batch < rows).clamp(1, curve.len() - 1);
    let (low, high) = (&curve[above - 1], &curve[above]);
    let part = (rows as f64 - low.batch as f64) / (high.batch - low.batch) as f64;
    // A first pair that falls steeply must not extrapolate below zero.
    (low.seconds + (high.seconds - low.seconds) * part).max(0.0)
}

/// The batches a profile times: 1 to `largest` in steps of about √2 (1, 2, 3, 4, 6, 8, 12, …).
pub fn batch_ladder(largest: usize) -> Vec<usize> {
    let mut batches = vec![1];
    let mut power = 2;
    while power <= largest {
        batches.push(power);
        if power * 3 / 2 <= largest {
            batches.push(power * 3 / 2);
        }
        power *= 2;
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_5_is_the_mean_of_4_and_6() {
        let point = |batch, seconds| Point { batch, seconds, spread: 0.0 };
        let curve = [point(1, 1.0), point(4, 2.0), point(6, 3.0)];
        for (rows, expected) in [(0, 0.0), (1, 1.0), (4, 2.0), (5, 2.5), (6, 3.0), (8, 4.0)] {
            assert_eq!(interpolate(&curve, rows), expected, "{rows} rows");
        }
    }

    #[test]
    fn ladder_is_the_papers() {
        assert_eq!(batch_ladder(24), [1, 2, 3, 4, 6, 8, 12, 16, 24]);
        assert_eq!(batch_ladder(4096).last(), Some(&4096));
    }
}
