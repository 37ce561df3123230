//! Which of the library's algorithms multiplies a shape with some number of rows: the fastest without split-K, found by
//! timing them in turns and kept on disk.

use super::device::CudaDevice;
use super::kept::Entry;
use super::product::{Algorithm, Operands, Products, Shape, splits, step_of};
use crate::ComputeError;

/// Algorithms that the library is asked for.
const PROPOSALS: usize = 16;
/// The fastest of them, which are timed again.
const FINALISTS: usize = 5;
/// Timings of each candidate, and of each finalist.
const ROUNDS: [usize; 2] = [2, 7];
/// More than any cache holds: as many layers are multiplied in turn as have so many bytes of weights.
const COLD_BYTES: usize = 256 << 20;

/// Bytes of an algorithm, which the library lets be kept for the same version of it.
const ALGORITHM_BYTES: usize = size_of::<Algorithm>();

/// Finds the algorithms for up to `rows_max` rows by timing them on the operands of some layers.
pub(super) fn tune(
    products: &mut Products,
    shape: Shape,
    rows_max: usize,
    layers: &[Operands],
) -> Result<(), ComputeError> {
    let entry = entry(products, shape, rows_max)?;
    let steps: Vec<usize> = steps_up_to(rows_max).collect();
    let kept = entry.read().map(|kept| -> Vec<Algorithm> {
        kept.chunks_exact(ALGORITHM_BYTES).map(read_algorithm).collect()
    });
    let usable = |kept: &Vec<Algorithm>| {
        kept.len() == steps.len()
            && !kept.iter().any(splits)
            && run_once(products, shape, &steps, kept, layers[0])
    };
    let algorithms = match kept.filter(usable) {
        Some(kept) => kept,
        None => {
            let fastest = |&rows: &usize| fastest(products, shape, rows, layers, PROPOSALS);
            let fastest = steps.iter().map(fastest).collect::<Result<Vec<_>, _>>()?;
            let bytes = fastest.iter().flat_map(|algorithm| algorithm.data);
            entry.write(&bytes.flat_map(u64::to_le_bytes).collect::<Vec<u8>>());
            fastest
        }
    };
    for (rows, algorithm) in steps.into_iter().zip(algorithms) {
        products.choose(shape, rows, algorithm);
    }
    Ok(())
}

/// Runs every algorithm once, with the first of the steps that it is for; whether all could be run. The first run loads an
/// algorithm's kernels, which takes milliseconds: not in the middle of a job.
fn run_once(
    products: &mut Products,
    shape: Shape,
    steps: &[usize],
    algorithms: &[Algorithm],
    operands: Operands,
) -> bool {
    let first = |&(at, algorithm): &(usize, &Algorithm)| !algorithms[..at].contains(algorithm);
    let mut distinct = algorithms.iter().enumerate().filter(first);
    distinct.all(|(at, algorithm)| products.run(shape, steps[at], operands, algorithm).is_ok())
}

/// Where the choice for a shape is kept: by everything that it depends on.
fn entry(products: &Products, shape: Shape, rows_max: usize) -> Result<Entry, ComputeError> {
    let (library, device) = (products.description(), products.device.description()?);
    Ok(Entry::new(
        "algorithms",
        format!(
            "{device}, {library}, {:?}, {shape:?}, up to {rows_max} rows in steps to {}, {PROPOSALS} proposals and those \
             for twice the rows timed on {COLD_BYTES} bytes of weights, {FINALISTS} again, {ROUNDS:?} times",
            products.device.half,
            step_of(rows_max)
        ),
    ))
}

/// The fastest of the library's first proposals for a shape and its rows.
pub(super) fn fastest(
    products: &mut Products,
    shape: Shape,
    rows: usize,
    layers: &[Operands],
    proposals: usize,
) -> Result<Algorithm, ComputeError> {
    let device = products.device.clone();
    let cold = COLD_BYTES.div_ceil(shape.weight_bytes()).min(layers.len());
    let layers = &layers[..cold];
    let mut algorithms = candidates(products, shape, rows, proposals)?;
    // Some that are proposed cannot be run after all. The first run of the others loads their kernels.
    algorithms.retain(|algorithm| products.run(shape, rows, layers[0], algorithm).is_ok());
    for rounds in ROUNDS {
        let seconds = in_turns(&device, algorithms.len(), rounds, &mut |which| {
            let run = |&operands| products.run(shape, rows, operands, &algorithms[which]);
            layers.iter().try_for_each(run)
        })?;
        let mut timed: Vec<(f64, Algorithm)> = seconds.into_iter().zip(algorithms).collect();
        timed.sort_by(|one, other| one.0.total_cmp(&other.0));
        algorithms = timed.into_iter().take(FINALISTS).map(|(_, algorithm)| algorithm).collect();
    }
    let none = || {
        let what = format!("multiply {rows} rows by {} x {}", shape.outputs, shape.inputs);
        device.error(&what, "no algorithm without split-K".to_owned())
    };
    algorithms.first().copied().ok_or_else(none)
}

/// What the library proposes for so many rows, and for twice as many: with few rows these can be faster.
fn candidates(
    products: &mut Products,
    shape: Shape,
    rows: usize,
    proposals: usize,
) -> Result<Vec<Algorithm>, ComputeError> {
    let mut candidates = products.proposed(shape, rows, proposals)?;
    for algorithm in products.proposed(shape, 2 * rows, proposals)? {
        if !candidates.contains(&algorithm) {
            candidates.push(algorithm);
        }
    }
    Ok(candidates)
}

/// Seconds of each of `count` pieces of work, which have their turns in some rounds. Of its timings the lower quartile
/// counts: what disturbs one makes it longer. The device has no pause in between, so its clock is that of a busy device.
pub(super) fn in_turns(
    device: &CudaDevice,
    count: usize,
    rounds: usize,
    work: &mut dyn FnMut(usize) -> Result<(), ComputeError>,
) -> Result<Vec<f64>, ComputeError> {
    let failed = || device.failed("time its kernels");
    let mut events = Vec::with_capacity(rounds * count);
    for turn in 0..rounds * count {
        let (start, end) = (device.event()?, device.event()?);
        start.record(&device.stream).map_err(failed())?;
        work(turn % count)?;
        end.record(&device.stream).map_err(failed())?;
        events.push((start, end));
    }
    let mut timings = vec![Vec::with_capacity(rounds); count];
    for (turn, (start, end)) in events.iter().enumerate() {
        timings[turn % count].push(f64::from(start.elapsed_ms(end).map_err(failed())?) / 1000.0);
    }
    let quartile = |mut timings: Vec<f64>| {
        timings.sort_by(f64::total_cmp);
        timings[timings.len() / 4]
    };
    Ok(timings.into_iter().map(quartile).collect())
}

fn read_algorithm(bytes: &[u8]) -> Algorithm {
    let mut data = [0; ALGORITHM_BYTES / size_of::<u64>()];
    for (word, bytes) in data.iter_mut().zip(bytes.chunks_exact(size_of::<u64>())) {
        *word = u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    }
    Algorithm { data }
}

/// The largest number of rows of every step up to that of `rows_max`, which is the last.
fn steps_up_to(rows_max: usize) -> impl Iterator<Item = usize> {
    let next = move |rows: &usize| (*rows < rows_max).then(|| step_of(rows + 1).min(rows_max));
    std::iter::successors(Some(step_of(1).min(rows_max)), next)
}

#[cfg(test)]
mod tests {
    use super::super::product::Into;
    use super::super::weights::address;
    use super::*;
    use half::bf16;

    #[test]
    fn steps_cover_all_rows() {
        for rows_max in [1, 16, 17, 600, 2048] {
            let steps: Vec<usize> = steps_up_to(rows_max).map(step_of).collect();
            assert!((1..=rows_max).all(|rows| steps.contains(&step_of(rows))), "{rows_max} rows");
        }
    }

    #[test]
    fn all_candidates_give_the_same_bits() {
        let Ok(device) = CudaDevice::open(0) else { return println!("skipped: no GPU") };
        let (outputs, inputs, rows_max) = (1280, 2048, 1000);
        let noise =
            |at: usize| (at.wrapping_mul(2_654_435_761) >> 8 & 0xffff) as f32 / 32768.0 - 1.0;
        let upload = |len: usize| {
            let values: Vec<bf16> = (0..len).map(|at| bf16::from_f32(noise(at))).collect();
            device.stream.clone_htod(&values).unwrap()
        };
        let (weights, rows) = (upload(outputs * inputs), upload(rows_max * inputs));
        let mut products = Products::new(&device).unwrap();
        for (into, count) in
            [(Into::F32, 1), (Into::F32, 33), (Into::AddF32, 64), (Into::F32, 1000)]
        {
            let shape = Shape { outputs, inputs, into };
            let mut expected: Option<Vec<f32>> = None;
            for algorithm in candidates(&mut products, shape, count, 64).unwrap() {
                let result = device.stream.alloc_zeros::<f32>(rows_max * outputs).unwrap();
                let operands = Operands {
                    weights: address(&weights, &device),
                    inputs: address(&rows, &device),
                    outputs: address(&result, &device),
                };
                if products.run(shape, count, operands, &algorithm).is_ok() {
                    let found = device.stream.clone_dtoh(&result).unwrap();
                    let expected = expected.get_or_insert_with(|| found.clone());
                    assert!(found == *expected, "{count} rows of {shape:?} by {algorithm:?}");
                }
            }
            assert!(expected.is_some_and(|values| values[0] != 0.0), "some algorithm ran");
        }
    }
}
