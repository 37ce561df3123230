//! Tier 2's kernels.

use super::assert_close;
use super::model::{Shape, noise};
use crate::{AttendRow, ContextKernels, ContextType, CpuContext, Isa};
use glinthawk_flight::Buffer;
use half::bf16;
use std::collections::BTreeMap;

/// How large queries, keys and values usually are.
const SIZE: f32 = 2.0;

/// A prompt's context: which pages hold it, scattered over the store.
struct Prompt {
    seed: u64,
    /// How large its queries, keys and values are. Large ones have scores that differ much.
    size: f32,
    pages: Vec<u32>,
}

impl Prompt {
    /// Prompts take every `of`-th page, from the store's end backwards.
    fn new(shape: &Shape, seed: u64, positions: usize, of: usize) -> Self {
        let count = positions.div_ceil(shape.page_positions as usize);
        Self {
            seed,
            size: SIZE,
            pages: (0..count).rev().map(|page| (page * of + seed as usize) as u32).collect(),
        }
    }

    fn row(&self, position: u32) -> AttendRow {
        AttendRow { slot: self.seed as u32, position, asked: true }
    }

    fn bind(&self, context: &mut CpuContext) {
        context.bind(self.seed as u32, 0, &self.pages).unwrap();
    }
}

/// Attends rows (prompt, position) as one batch; returns each row's output.
fn attend(context: &mut CpuContext, shape: &Shape, rows: &[(&Prompt, u32)]) -> Vec<Vec<bf16>> {
    attend_asked(context, shape, rows, |_| true)
}

/// The same, where only some of the rows are asked for.
fn attend_asked(
    context: &mut CpuContext,
    shape: &Shape,
    rows: &[(&Prompt, u32)],
    asked: impl Fn(usize) -> bool,
) -> Vec<Vec<bf16>> {
    attend_changed(context, shape, rows, asked, |_| false)
}

/// The same, where the queries, keys and values of some positions are not numbers.
fn attend_changed(
    context: &mut CpuContext,
    shape: &Shape,
    rows: &[(&Prompt, u32)],
    asked: impl Fn(usize) -> bool,
    is_nan: impl Fn(u32) -> bool,
) -> Vec<Vec<bf16>> {
    let config = shape.config();
    let mut qkv = Buffer::zeroed(rows.len() * config.qkv_width() * 2);
    for (&(prompt, position), values) in
        rows.iter().zip(qkv.bf16_mut().chunks_exact_mut(config.qkv_width()))
    {
        for (column, value) in values.iter_mut().enumerate() {
            let seed = 1000 * prompt.seed + u64::from(position);
            *value = bf16::from_f32(prompt.size * noise(seed, column as u64));
        }
        if is_nan(position) {
            values.fill(bf16::NAN);
        }
    }
    let mut attended = Buffer::zeroed(rows.len() * config.query_width() * 2);
    attended.bf16_mut().fill(bf16::NAN);
    rows.iter().for_each(|(prompt, _)| prompt.bind(context));
    let row = |(index, (prompt, position)): (usize, &(&Prompt, u32))| AttendRow {
        asked: asked(index),
        ..prompt.row(*position)
    };
    let rows: Vec<AttendRow> = rows.iter().enumerate().map(row).collect();
    context.attend(1, &rows, &qkv, &mut attended).unwrap();
    attended.bf16().chunks_exact(config.query_width()).map(<[bf16]>::to_vec).collect()
}

/// Attends a prompt from its start in chunks; returns every position's output.
fn attend_in_chunks(
    context: &mut CpuContext,
    shape: &Shape,
    prompt: &Prompt,
    end: u32,
    chunk: u32,
) -> Vec<Vec<bf16>> {
    let chunks = (0..end).step_by(chunk as usize).map(|start| start..(start + chunk).min(end));
    chunks
        .flat_map(|positions| {
            let rows: Vec<_> = positions.map(|position| (prompt, position)).collect();
            attend(context, shape, &rows)
        })
        .collect()
}

fn shapes() -> Vec<Shape> {
    let base = Shape::default();
    let mut shapes: Vec<Shape> =
        (1..=8).map(|group| Shape { heads: 2 * group, kv_heads: 2, ..base.clone() }).collect();
    shapes.extend([80, 96, 128, 16].map(|head_dim| Shape {
        head_dim,
        heads: 6,
        kv_heads: 2,
        ..base.clone()
    }));
    shapes.push(Shape { heads: 20, kv_heads: 1, ..base.clone() });
    shapes.push(Shape { window: Some(1), ..base.clone() });
    shapes.push(Shape { window: Some(37), ..base });
    of_every_type(shapes)
}

/// Each of the shapes with contexts of every type.
fn of_every_type(shapes: Vec<Shape>) -> Vec<Shape> {
    let types = ContextType::ALL.into_iter();
    let typed =
        |context_type| shapes.iter().map(move |shape| Shape { context_type, ..shape.clone() });
    types.flat_map(typed).collect()
}

/// The shape with every path of this machine, and every size of pages on it.
fn on_every_path(shape: &Shape) -> impl Iterator<Item = (Shape, Isa)> {
    let sized = move |isa: Isa| {
        let sizes = isa.page_positions().iter();
        sizes.map(move |&page_positions| (Shape { page_positions, ..shape.clone() }, isa))
    };
    Isa::available().into_iter().flat_map(sized)
}

#[test]
fn paths_agree_with_the_oracle() {
    for (shape, isa) in shapes().iter().flat_map(on_every_path) {
        if isa == Isa::Portable {
            continue;
        }
        let mut oracle = shape.context(Isa::Portable, 2, 64);
        let (one, other) = (Prompt::new(&shape, 1, 150, 3), Prompt::new(&shape, 2, 70, 3));
        let expected = [
            attend_in_chunks(&mut oracle, &shape, &one, 150, 50).concat(),
            attend_in_chunks(&mut oracle, &shape, &other, 70, 70).concat(),
        ]
        .concat();
        let mut context = shape.context(isa, 2, 64);
        let found = [
            attend_in_chunks(&mut context, &shape, &one, 150, 50).concat(),
            attend_in_chunks(&mut context, &shape, &other, 70, 70).concat(),
        ]
        .concat();
        let wide = |values: &[bf16]| values.iter().map(|value| value.to_f32()).collect::<Vec<_>>();
        assert_close(
            &format!("{isa}: attention of {shape:?}"),
            &wide(&found),
            &wide(&expected),
            0.012,
        );
    }
}

#[test]
fn rows_that_nobody_asks_for_are_stored() {
    let base = Shape { heads: 6, kv_heads: 2, ..Shape::default() };
    let shapes = [None, Some(37)].map(|window| Shape { window, ..base.clone() });
    for shape in of_every_type(shapes.to_vec()) {
        for (shape, isa) in on_every_path(&shape) {
            let prompts: Vec<Prompt> =
                (0..4).map(|seed| Prompt::new(&shape, seed, 160, 5)).collect();
            // A chunk that is asked for from its midst on, a row alone, a chunk that is not, and one by its last row.
            let ranges = [0..150, 0..1, 0..40, 0..33];
            let rows: Vec<(&Prompt, u32)> = prompts
                .iter()
                .zip(ranges.clone())
                .flat_map(|(prompt, range)| range.map(move |position| (prompt, position)))
                .collect();
            let asked = |index: usize| (100..150).contains(&index) || index + 1 == rows.len();
            let next: Vec<(&Prompt, u32)> =
                prompts.iter().zip(&ranges).map(|(prompt, range)| (prompt, range.end)).collect();
            for threads in [1, 2] {
                let mut context = shape.context(isa, threads, 5 * 160);
                let all = attend(&mut context, &shape, &rows);
                let all_next = attend(&mut context, &shape, &next);
                let mut context = shape.context(isa, threads, 5 * 160);
                let some = attend_asked(&mut context, &shape, &rows, asked);
                for row in 0..rows.len() {
                    let (zeros, all) = (vec![bf16::ZERO; all[row].len()], &all[row]);
                    let expected = if asked(row) { all } else { &zeros };
                    assert!(some[row] == *expected, "{isa}, {shape:?}: row {row}");
                }
                let some_next = attend(&mut context, &shape, &next);
                assert!(some_next == all_next, "{isa}, {shape:?}: the rows after them");
            }
        }
    }
}

#[test]
fn bits_depend_on_the_row_alone() {
    let base = Shape { heads: 6, kv_heads: 2, ..Shape::default() };
    let mut shapes = [None, Some(100)].map(|window| Shape { window, ..base.clone() }).to_vec();
    shapes.push(Shape { head_dim: 32, window: Some(500), ..base.clone() });
    shapes.push(Shape { head_dim: 128, ..base.clone() });
    for shape in of_every_type(shapes) {
        for (shape, isa) in on_every_path(&shape) {
            // Long enough for several splits, if the path is fast enough for the test.
            let long = if shape.head_dim == base.head_dim { 2100 } else { 1100 };
            let end = if isa == Isa::Portable { 100 } else { long };
            let mut prompt = Prompt::new(&shape, 1, end as usize, 2);
            if shape.head_dim != base.head_dim {
                prompt.size = 6.0;
            }
            let other = Prompt::new(&shape, 2, 40, 2);
            let pages = 2 * prompt.pages.len() + 2;
            let expected =
                attend_in_chunks(&mut shape.context(isa, 1, pages), &shape, &prompt, end, 300);
            for (threads, chunk) in [(1, 1), (2, 16), (3, 2100), (1, 2100), (2, 7)] {
                // One row at a time takes long: only the last positions of a long prompt.
                let mut context = shape.context(isa, threads, pages);
                let from = if chunk < 16 && end > 300 { end - 150 } else { 0 };
                attend_in_chunks(&mut context, &shape, &prompt, from, 300);
                let starts = (from..end).step_by(chunk as usize);
                let mut found = Vec::new();
                for start in starts {
                    let mut rows: Vec<_> = (start..(start + chunk).min(end))
                        .map(|position| (&prompt, position))
                        .collect();
                    // Another prompt's row beside them, first or last.
                    let position = start / chunk % 40;
                    let place = if start % 2 == 0 { 0 } else { rows.len() };
                    rows.insert(place, (&other, position));
                    let mut outputs = attend(&mut context, &shape, &rows);
                    outputs.remove(place);
                    found.extend(outputs);
                }
                for (position, (found, expected)) in
                    (from..).zip(found.iter().zip(&expected[from as usize..]))
                {
                    assert!(
                        found == expected,
                        "{isa}, {}: position {position}, {threads} threads, chunks of {chunk}",
                        shape.context_type
                    );
                }
            }
        }
    }
}

#[test]
fn rows_of_a_long_chunk_see_windows_that_begin_anywhere() {
    // Rows of one job begin at every page, the last ones of a stretch included.
    let shape = Shape { heads: 2, kv_heads: 2, window: Some(100), ..Shape::default() };
    for (shape, isa) in on_every_path(&shape).filter(|(_, isa)| *isa != Isa::Portable) {
        let prompt = Prompt::new(&shape, 1, 700, 2);
        let attend = |chunk| {
            let mut context = shape.context(isa, 1, 2 * prompt.pages.len() + 2);
            attend_in_chunks(&mut context, &shape, &prompt, 700, chunk)
        };
        assert!(attend(640) == attend(7), "{isa}");
    }
}

#[test]
fn the_size_of_pages_decides_no_bit() {
    for shape in of_every_type(vec![Shape { window: Some(37), ..Shape::default() }]) {
        let mut first: BTreeMap<Isa, Vec<Vec<bf16>>> = BTreeMap::new();
        for (shape, isa) in on_every_path(&shape) {
            let prompt = Prompt::new(&shape, 1, 90, 2);
            let mut context = shape.context(isa, 2, 2 * prompt.pages.len() + 1);
            let found = attend_in_chunks(&mut context, &shape, &prompt, 90, 13);
            let expected = first.entry(isa).or_insert_with(|| found.clone());
            assert!(found == *expected, "{isa}: pages of {}", shape.page_positions);
        }
    }
}

#[test]
fn a_size_of_pages_that_a_path_cannot_use_is_refused() {
    let shape = Shape { page_positions: 7, ..Shape::default() };
    for isa in Isa::available() {
        let refused = shape.try_context(isa, 1, 4).err().map(|error| error.to_string());
        let expected = format!("shape not supported: pages of 7 positions on {isa}");
        assert_eq!(refused, Some(expected));
    }
}

#[test]
fn leftovers_of_another_prompt_do_no_harm() {
    let cases = of_every_type(vec![Shape::default()]);
    for (shape, isa) in cases.iter().flat_map(on_every_path) {
        let shape = &shape;
        let prompt = Prompt::new(shape, 1, 20, 1);
        let pages = prompt.pages.len() + 1;
        let mut context = shape.context(isa, 1, pages);
        let mut clean = shape.context(isa, 1, pages);
        // A prompt full of NaN used the pages before.
        let mut qkv = Buffer::zeroed(shape.config().qkv_width() * 2);
        qkv.bf16_mut().fill(bf16::NAN);
        let mut attended = Buffer::zeroed(shape.config().query_width() * 2);
        prompt.bind(&mut context);
        for position in 0..prompt.pages.len() as u32 * shape.page_positions {
            context.attend(1, &[prompt.row(position)], &qkv, &mut attended).unwrap();
        }
        context.attend(1, &[], &qkv, &mut attended).unwrap();
        let found = attend_in_chunks(&mut context, shape, &prompt, 20, 3);
        let expected = attend_in_chunks(&mut clean, shape, &prompt, 20, 3);
        assert!(found == expected, "{isa}, {}", shape.context_type);
    }
}

#[test]
fn what_is_stored_again_forgets_what_stood_behind_it() {
    let cases = of_every_type(vec![Shape { heads: 6, kv_heads: 2, ..Shape::default() }]);
    for (shape, isa) in cases.iter().flat_map(on_every_path) {
        let shape = &shape;
        let prompt = Prompt::new(shape, 1, 50, 1);
        let mut clean = shape.context(isa, 1, prompt.pages.len() + 1);
        let expected = attend_in_chunks(&mut clean, shape, &prompt, 50, 50);
        for first in [9, 13, 14, 15, 16, 27, 29, 30, 31, 32] {
            let mut context = shape.context(isa, 1, prompt.pages.len() + 1);
            attend_in_chunks(&mut context, shape, &prompt, first, 7);
            // A row, and four behind it that turn out to be of other tokens.
            let rows: Vec<_> = (first..first + 5).map(|position| (&prompt, position)).collect();
            attend_changed(&mut context, shape, &rows, |_| true, |position| position > first + 1);
            for position in first + 1..first + 6 {
                let found = attend(&mut context, shape, &[(&prompt, position)]);
                let what = format!("{isa}, {}: {position} after {first}", shape.context_type);
                assert!(found[0] == expected[position as usize], "{what}");
            }
        }
    }
}

#[test]
fn what_is_not_a_number_harms_no_row_before_it() {
    let cases = of_every_type(vec![Shape { heads: 6, kv_heads: 2, ..Shape::default() }]);
    for (shape, isa) in cases.iter().flat_map(on_every_path) {
        let shape = &shape;
        let (one, other) = (Prompt::new(shape, 1, 50, 2), Prompt::new(shape, 2, 50, 2));
        let pages = 2 * one.pages.len() + 2;
        let mut clean = shape.context(isa, 1, pages);
        let expected = attend_in_chunks(&mut clean, shape, &one, 50, 50);
        let expected_other = attend_in_chunks(&mut clean, shape, &other, 5, 5);
        for (from, reversed) in [(0, false), (0, true), (7, false)] {
            let mut context = shape.context(isa, 2, pages);
            attend_in_chunks(&mut context, shape, &one, from, 7);
            let mut rows: Vec<_> = (from..50).map(|position| (&one, position)).collect();
            rows.extend((0..5).map(|position| (&other, position)));
            if reversed {
                rows.reverse();
            }
            let found = attend_changed(&mut context, shape, &rows, |_| true, |at| at == 21);
            for ((prompt, position), found) in rows.into_iter().zip(found) {
                let all = if prompt.seed == 1 { &expected } else { &expected_other };
                let what = format!("{isa}, {}: position {position}", shape.context_type);
                if prompt.seed == 1 && position >= 21 {
                    assert!(found.iter().all(|value| value.is_nan()), "{what}");
                } else {
                    assert!(found == all[position as usize], "{what} of {}", prompt.seed);
                }
            }
        }
    }
}

#[test]
fn rows_of_one_prompt_may_come_apart() {
    let cases = of_every_type(vec![Shape { heads: 6, kv_heads: 2, ..Shape::default() }]);
    for (shape, isa) in cases.iter().flat_map(on_every_path) {
        let shape = &shape;
        let (one, other) = (Prompt::new(shape, 1, 40, 2), Prompt::new(shape, 2, 40, 2));
        let pages = 2 * one.pages.len() + 2;
        let expected = attend_in_chunks(&mut shape.context(isa, 1, pages), shape, &one, 40, 40);
        let mut context = shape.context(isa, 2, pages);
        let mut rows: Vec<(&Prompt, u32)> = (0..40).map(|position| (&one, position)).collect();
        rows.reverse();
        rows.insert(7, (&other, 0));
        rows.insert(30, (&other, 1));
        let mut found = attend(&mut context, shape, &rows);
        found.remove(30);
        found.remove(7);
        found.reverse();
        assert!(found == expected, "{isa}, {}", shape.context_type);
    }
}

#[test]
fn a_page_may_belong_to_several_prompts() {
    let cases = of_every_type(vec![Shape { heads: 6, kv_heads: 2, ..Shape::default() }]);
    for (shape, isa) in cases.iter().flat_map(on_every_path) {
        let shape = &shape;
        // Two prompts with the same first positions, in the same two pages, which only the first stored.
        let shared = 2 * shape.page_positions;
        let fork = |seed, own: u32| Prompt { seed, size: SIZE, pages: vec![5, 2, own] };
        let (one, other) = (fork(1, 0), fork(2, 1));
        let apart = |context: &mut CpuContext, positions: [u32; 2]| {
            let rows = [(&one, positions[0]), (&other, positions[1])];
            rows.map(|row| attend(context, shape, &[row]).remove(0))
        };
        let mut alone = shape.context(isa, 2, 8);
        let mut context = shape.context(isa, 2, 8);
        attend_in_chunks(&mut alone, shape, &one, shared, 32);
        attend_in_chunks(&mut context, shape, &one, shared, 32);
        for positions in [[shared; 2], [shared + 1; 2], [shared + 2; 2]] {
            let expected = apart(&mut alone, positions);
            let rows = [(&one, positions[0]), (&other, positions[1])];
            let found = attend(&mut context, shape, &rows);
            assert!(found == expected, "{isa}, {}: {positions:?}", shape.context_type);
        }
    }
}

#[test]
fn prompts_that_begin_alike_attend_together() {
    let base = Shape { heads: 6, kv_heads: 2, ..Shape::default() };
    let narrow = Shape { head_dim: 80, heads: 20, ..base.clone() };
    let windowed = Shape { window: Some(100), ..base.clone() };
    // Prompts have this many pages of 16 positions of the trunk's, then four pages of their own. A split has 64.
    let cases: [&[usize]; 4] = [
        &[70, 70, 70, 69, 68, 65, 64, 64, 63, 10, 10, 10, 4, 4, 3, 0],
        &[70, 70, 71, 0, 10],
        &[64, 67, 66],
        &[130, 130, 129, 130],
    ];
    for shape in of_every_type(vec![base, narrow, windowed]) {
        let fast = on_every_path(&shape).filter(|(_, isa)| *isa != Isa::Portable);
        for ((shape, isa), threads) in fast.flat_map(|path| [(path.clone(), 1), (path, 3)]) {
            let pages = 130 * 16 / shape.page_positions;
            let trunk = Prompt { seed: 0, size: SIZE, pages: (0..pages).rev().collect() };
            let [mut alone, mut together] = [1, threads].map(|threads| {
                let mut context = shape.context(isa, threads, 200);
                attend_in_chunks(&mut context, &shape, &trunk, 130 * 16, 300);
                context
            });
            for shared in cases {
                check_forks(&shape, &trunk, shared, &mut alone, &mut together);
            }
        }
    }
}

/// Attends prompts that begin with so many times 16 of the trunk's positions, in whole pages, row by row, and all at
/// once: single rows, chunks, and single rows again.
fn check_forks(
    shape: &Shape,
    trunk: &Prompt,
    shared: &[usize],
    alone: &mut CpuContext,
    together: &mut CpuContext,
) {
    let shared: Vec<usize> =
        shared.iter().map(|count| count * 16 / shape.page_positions as usize).collect();
    let fork = |(index, &count): (usize, &usize)| {
        let own = (trunk.pages.len() + 4 * index) as u32;
        let pages = trunk.pages[..count].iter().copied().chain(own..own + 4).collect();
        Prompt { seed: 1 + index as u64, size: SIZE, pages }
    };
    let prompts: Vec<Prompt> = shared.iter().enumerate().map(fork).collect();
    for (from, chunk) in [(0, 1), (1, 20), (21, 1)] {
        let rows_of = |(index, prompt): (usize, _)| {
            let start = shared[index] as u32 * shape.page_positions + from;
            let count = if index % 4 == 0 { 1 } else { chunk };
            (start..start + count).map(move |position| (prompt, position))
        };
        let rows: Vec<(&Prompt, u32)> = prompts.iter().enumerate().flat_map(rows_of).collect();
        let is_last =
            |index: usize| rows.get(index + 1).is_none_or(|next| next.0.seed != rows[index].0.seed);
        let found = attend(together, shape, &rows);
        let last = attend_asked(together, shape, &rows, is_last);
        for (index, (row, found)) in rows.iter().zip(found).enumerate() {
            let expected = attend(alone, shape, &[*row]).remove(0);
            assert!(found == expected, "{shared:?}: {} at {} of {shape:?}", row.0.seed, row.1);
            assert!(!is_last(index) || last[index] == expected, "{shared:?}: only last rows");
        }
    }
}
