//! A model's files decide its results. Any change in them gives other results, and an output file
//! does not mix these with earlier ones.

use crate::cluster_support::{Dispatcher, Running, worker};
use crate::common::{Case, Finished, glinthawk};
use crate::folder_support::{BEYOND, VOCAB};
use glinthawk_compute::Isa;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const INPUT: &str = r#"{"custom_id":"chat","messages":[{"role":"user","content":"Hello"}],"max_tokens":5}
{"custom_id":"text","prompt":"Once upon a time","max_tokens":5}
"#;

/// A case with the tiny model in a folder of its own.
fn case(input: &str) -> (Case, PathBuf) {
    let mut case = Case::new(input);
    let model = case.path("model");
    crate::folder_support::write(&model);
    case.model = model.to_str().expect("UTF-8").to_owned();
    (case, model)
}

/// The ids of all results of a run from the start, by custom id.
fn ids(case: &Case, options: &[&str]) -> BTreeMap<String, Value> {
    let mut command = case.command(options);
    command.arg("--overwrite").env("GLINTHAWK_CACHE", case.path("cache"));
    Finished::of(&mut command).expect(0);
    case.answers().into_iter().map(|(name, answer)| (name, answer["id"].clone())).collect()
}

#[track_caller]
fn check_all_differ(before: &BTreeMap<String, Value>, after: &BTreeMap<String, Value>) {
    assert_eq!(before.len(), after.len());
    for (name, id) in before {
        assert_ne!(id, &after[name], "{name} would be taken for the old result");
    }
}

/// Changes 4,000 bytes in the middle of a tensor.
fn flip_bytes(file: &Path) {
    let mut bytes = fs::read(file).expect("the weights");
    let header = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
    // The embedding comes first: 258 × 64 values of two bytes.
    for value in bytes[8 + header + 1000..][..4000].chunks_mut(2) {
        value[1] ^= 0x80;
    }
    fs::write(file, bytes).expect("other weights");
}

#[test]
fn a_change_in_any_file_of_the_model_makes_other_results() {
    let replace = |file: &str, from: &str, to: &str| {
        let (file, from, to) = (file.to_owned(), from.to_owned(), to.to_owned());
        Box::new(move |folder: &Path| {
            let text = fs::read_to_string(folder.join(&file)).expect("a text file");
            assert!(text.contains(&from), "{file}");
            fs::write(folder.join(&file), text.replacen(&from, &to, 1)).expect("another text");
        }) as Box<dyn Fn(&Path)>
    };
    let write = |file: &'static str, text: &'static str| {
        Box::new(move |folder: &Path| fs::write(folder.join(file), text).expect("a new file"))
            as Box<dyn Fn(&Path)>
    };
    let (case, folder) = case(INPUT);
    let before = ids(&case, &[]);
    assert_eq!(before, ids(&case, &[]), "nothing changed");
    for change in [
        replace("chat_template.jinja", ": ", " says "),
        replace("tokenizer.json", BEYOND, "<NEW>"),
        replace("tokenizer_config.json", "<|im_end|>", "<|im_start|>"),
        write("special_tokens_map.json", r#"{"pad_token": "<|im_end|>"}"#),
        write("generation_config.json", r#"{"eos_token_id": [5, 257]}"#),
        replace("config.json", "10000.0", "20000.0"),
        Box::new(|folder: &Path| flip_bytes(&folder.join("model.safetensors"))),
    ] {
        fs::remove_dir_all(&folder).expect("the folder is ours");
        crate::folder_support::write(&folder);
        assert_eq!(before, ids(&case, &[]), "the same files, written anew");
        change(&folder);
        check_all_differ(&before, &ids(&case, &[]));
    }
}

#[test]
fn another_way_to_compute_makes_other_results() {
    let (case, _) = case(INPUT);
    let (best, other) = (Isa::detect().name(), Isa::Portable.name());
    let before = ids(&case, &[]);
    assert_eq!(before, ids(&case, &["--isa", best]), "the best is the default");
    assert_eq!(before, ids(&case, &["--tier1", "1", "--tier2", "1"]), "in two tiers too");
    if best != other {
        check_all_differ(&before, &ids(&case, &["--isa", other]));
    }
    check_all_differ(&before, &ids(&case, &["--context-type", "int8"]));
    check_all_differ(&before, &ids(&case, &["--max-context", "128"]));
}

/// Runs a case with two workers from elsewhere, the second on this instruction set; returns the ids and what the
/// dispatcher said.
fn ids_of_cluster(case: &Case, options: &[&str], isa: &str) -> (BTreeMap<String, Value>, String) {
    let options = [&["--tier1", "1", "--workers", "2"], options].concat();
    let dispatcher = Dispatcher::listen(case, "127.0.0.1:0", &options);
    let workers = [dispatcher.worker(&[]), dispatcher.worker(&["--isa", isa])];
    let said = dispatcher.running.finish().expect(0).stderr;
    for worker in workers {
        worker.finish().expect(0);
    }
    let ids = case.answers().into_iter().map(|(name, answer)| (name, answer["id"].clone()));
    (ids.collect(), said)
}

#[test]
fn what_the_nodes_compute_on_is_part_of_their_results() {
    let (case, _) = case(INPUT);
    let (best, portable) = (Isa::detect().name(), Isa::Portable.name());
    let of_one_process = ids(&case, &[]);
    let fresh = || fs::remove_file(case.output()).expect("the output of the run before");
    fresh();
    // The second time all is done, which shows only once the workers are there.
    for _ in 0..2 {
        let (of_one_kind, said) = ids_of_cluster(&case, &[], best);
        assert_eq!(of_one_kind, of_one_process, "one kind is one kind in any topology");
        assert!(!said.contains("different kinds"), "{said}");
    }
    if best == portable {
        return;
    }
    fresh();
    for _ in 0..2 {
        let (mixed, said) = ids_of_cluster(&case, &[], portable);
        check_all_differ(&of_one_process, &mixed);
        // Each tier is of one kind, so no result depends on where it is computed.
        assert!(!said.contains("different kinds"), "{said}");
    }
    fresh();
    // In a hybrid, both attend.
    let (hybrid, said) = ids_of_cluster(&case, &["--hybrid"], portable);
    check_all_differ(&of_one_process, &hybrid);
    let best = Isa::detect().kind();
    let kinds = format!("different kinds (tier1-0 {best}, tier2-0-1 {portable})");
    assert!(said.contains(&kinds), "{said}");
    fresh();
    let (capped, said) = ids_of_cluster(&case, &["--isa", portable], portable);
    assert!(!said.contains("different kinds"), "{said}");
    fresh();
    assert_eq!(capped, ids(&case, &["--isa", portable]), "--isa is for all nodes");
}

#[test]
fn a_worker_with_other_weights_on_its_disk_takes_the_dispatchers() {
    let mut case = case(INPUT).0;
    // Dispatcher and worker run in folders of their own, in which one name means two models.
    case.model = "model".to_owned();
    let elsewhere = case.path("elsewhere");
    crate::folder_support::write(&elsewhere.join("model"));
    let here = case.path("here");
    crate::folder_support::write(&here.join("model"));
    let run = |options: &[&str], worker_folder: Option<&Path>| {
        let mut command = case.command(options);
        command.arg("--overwrite").current_dir(&here);
        let Some(worker_folder) = worker_folder else {
            Finished::of(&mut command).expect(0);
            return (case.results(), String::new());
        };
        let dispatcher = Dispatcher::start(command.args(["--listen", "127.0.0.1:0"]));
        let mut command = worker(&dispatcher.address, &[]);
        command.current_dir(worker_folder).env("GLINTHAWK_LOG", "info");
        let worker = Running::start(&mut command);
        dispatcher.running.finish().expect(0);
        (case.results(), worker.finish().expect(0).stderr)
    };
    let expected = run(&[], None).0;
    let cluster = ["--tier1", "1", "--workers", "1"];
    let same = run(&cluster, Some(&elsewhere));
    flip_bytes(&elsewhere.join("model/model.safetensors"));
    let other = run(&cluster, Some(&elsewhere));
    assert_eq!(same.0, expected);
    assert_eq!(other.0, expected);
    assert!(same.1.contains("from this disk"), "{}", same.1);
    assert!(other.1.contains("from the dispatcher"), "{}", other.1);
}

#[test]
fn a_token_beyond_the_models_rows_is_an_error_line_and_no_panic() {
    let input = format!(
        r#"{{"custom_id":"chat","messages":[{{"role":"user","content":"a {BEYOND} b"}}]}}
{{"custom_id":"text","prompt":"a {BEYOND} b"}}
{{"custom_id":"fine","prompt":"a new b"}}
"#
    );
    let (case, _) = case(&input);
    for isa in Isa::available() {
        case.run(&["--overwrite", "--isa", isa.name()]).expect(3);
        let answers = case.answers();
        assert_eq!(answers["fine"]["response"]["status_code"], 200);
        for name in ["chat", "text"] {
            let response = &answers[name]["response"];
            assert_eq!(response["status_code"], 400, "{response}");
            let message = response["body"]["error"]["message"].as_str().expect("a message");
            for part in [BEYOND, &VOCAB.to_string(), "0 to 257"] {
                assert!(message.contains(part), "\"{part}\" is missing: {message}");
            }
        }
    }
    let failed = Finished::of(&mut glinthawk(["generate", "--model", &case.model, BEYOND]));
    failed.expect_error(&[BEYOND, "258 tokens"]);
}
