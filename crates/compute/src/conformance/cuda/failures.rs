//! What is said when a GPU has no room, or a kernel fails: the device, what was being done, and its shape.

use super::{Prompt, device, limits, load, step};
use crate::Threads;
use crate::conformance::model::Shape;
use crate::cuda::{CudaModel, StepLimits};
use glinthawk_flight::Sample;
use std::process::Command;
use std::sync::Arc;

#[test]
fn no_room_is_said_and_harms_nothing() {
    let Some(device) = device() else { return };
    let shape = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    let prompt = Prompt::new(&shape, 1, 3);
    let expected = step(&mut load(&shape, &device), &shape, &[prompt.row(0)], &[]);
    let threads = Arc::new(Threads::new(1).unwrap());
    let limits = StepLimits { pages: 1 << 34, ..limits() };
    let failed = CudaModel::load_from(&shape.source(), &device, limits, &threads, &mut |_, _| {});
    let said = failed.err().expect("no GPU has so much memory").to_string();
    assert!(said.starts_with("cuda:0: cannot allocate contexts: "), "{said}");
    assert!(said.contains("GiB are wanted"), "{said}");
    assert_eq!(step(&mut load(&shape, &device), &shape, &[prompt.row(0)], &[]), expected);
}

/// Set for the process in which a kernel fails.
const FAILS: &str = "GLINTHAWK_TEST_KERNEL_FAILS";

#[test]
fn a_kernel_that_fails_is_said() {
    if std::env::var_os(FAILS).is_some() {
        return fail();
    }
    if device().is_none() {
        return;
    }
    // After such an error a process cannot use the device any more, so it is one of its own.
    let said = |blocking: bool| {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let name = concat!(module_path!(), "::a_kernel_that_fails_is_said");
        let name = name.split_once("::").expect("it begins with the crate").1;
        command.args(["--exact", name, "--nocapture"]).env(FAILS, "1");
        if blocking {
            command.env("CUDA_LAUNCH_BLOCKING", "1");
        }
        String::from_utf8_lossy(&command.output().unwrap().stdout).into_owned()
    };
    let later = said(false);
    assert!(later.contains("said: cuda:0: cannot "), "{later}");
    assert!(later.contains("with CUDA_LAUNCH_BLOCKING=1 the error names it"), "{later}");
    let at_once = said(true);
    assert!(at_once.contains("said: cuda:0: cannot run embed over (3, 1, 1): "), "{at_once}");
    println!("{later}\n{at_once}");
}

/// Prints what is said of a step after a kernel that reads where nothing is.
fn fail() {
    let device = device().expect("there was one");
    let shape = Shape { hidden: 96, vocab: 136, ..Shape::default() };
    let mut model = load(&shape, &device);
    let rows = [Prompt::new(&shape, 1, 3).row(0)];
    step(&mut model, &shape, &rows, &[]);
    let failed = model
        .embed_nothing(3)
        .and_then(|()| model.submit(&rows, &[], &[Sample::default()]))
        .and_then(|()| model.tokens());
    println!("said: {}", failed.err().expect("nothing is there"));
    // The device cannot be used any more, not even to give memory back.
    std::process::exit(0);
}
