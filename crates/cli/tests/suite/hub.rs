//! `pull org/name` against a hub on the loopback that breaks off, lies, or means harm.

use crate::common::{Finished, glinthawk};
use crate::hub_support::{Hub, Reply};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const REVISION: &str = "0123456789abcdef0123456789abcdef01234567";
const WEIGHTS: &[u8] = b"weights of a model that nobody loads";
/// Of `WEIGHTS`.
const SHA256: &str = "0fc93f8bc1b7a19c7b9bccc3998a783c1a7cd593829cf8a83607377fa482eac6";

/// What a hub offers of `org/name`, and a machine that pulls it.
struct Case {
    folder: TempDir,
    listing: Value,
    files: BTreeMap<String, Vec<u8>>,
}

impl Case {
    /// A model with its weights in one file.
    fn new() -> Self {
        let mut case = Self {
            folder: TempDir::new().expect("a folder"),
            listing: json!({"sha": REVISION, "siblings": []}),
            files: BTreeMap::new(),
        };
        case.add("config.json", b"{}");
        case.add("tokenizer.json", b"{}");
        case.add("model.safetensors", WEIGHTS);
        case
    }

    /// A model whose weights are in a file of this name, says its index.
    fn with_shard(shard: &str) -> Self {
        let mut case = Self::new();
        case.add("model.safetensors.index.json", json!({"weight_map": {"a": shard}}).to_string());
        case.add(shard, WEIGHTS);
        case
    }

    fn add(&mut self, name: &str, bytes: impl AsRef<[u8]>) {
        let siblings = self.listing["siblings"].as_array_mut().expect("a list");
        siblings.push(json!({"rfilename": name}));
        self.files.insert(name.to_owned(), bytes.as_ref().to_vec());
    }

    /// Changes what the hub says about the file that was added last.
    fn last(&mut self) -> &mut Value {
        self.listing["siblings"].as_array_mut().expect("a list").last_mut().expect("a file")
    }

    fn hub(&self) -> Hub {
        self.hub_that(|_, reply| reply)
    }

    /// A hub that changes the replies about files.
    fn hub_that(&self, change: impl Fn(&str, Reply) -> Reply + Send + 'static) -> Hub {
        let (listing, files) = (self.listing.to_string(), self.files.clone());
        Hub::start(move |request| {
            let path = request.path.split('?').next().unwrap_or_default();
            if path == "/api/models/org/name/revision/main" {
                return Reply::ok(listing.as_bytes());
            }
            let file = path.strip_prefix(&format!("/org/name/resolve/{REVISION}/"));
            let file = file.or(path.strip_prefix("/cdn/")).unwrap_or_default().to_owned();
            match files.get(&file) {
                Some(bytes) => {
                    let etag: String = file.bytes().map(|byte| format!("{byte:02x}")).collect();
                    let reply = Reply::ok(bytes).with("X-Repo-Commit", REVISION);
                    change(&file, reply.with("ETag", &format!("\"{etag:.80}\"")))
                }
                None => Reply::status(404),
            }
        })
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn model(&self) -> PathBuf {
        self.cache().join("hub/org/name")
    }

    fn pull(&self, endpoint: &str) -> Finished {
        let mut command = glinthawk(["pull", "org/name"]);
        command.env("HF_ENDPOINT", endpoint).env("GLINTHAWK_CACHE", self.cache());
        command.env("HF_HOME", self.folder.path().join("home")).env_remove("HF_TOKEN");
        // The test machine may have a proxy, which has no business here.
        command.env("NO_PROXY", "127.0.0.1").current_dir(self.folder.path());
        Finished::of(&mut command)
    }

    /// The model is in the cache, whole, and nothing else is on the machine.
    #[track_caller]
    fn expect_whole(&self) {
        self.expect_nothing_outside();
        for (name, bytes) in self.files.iter().filter(|(name, _)| !name.contains('/')) {
            assert_eq!(fs::read(self.model().join(name)).ok().as_ref(), Some(bytes), "{name}");
        }
        assert!(!self.model().with_file_name(".name.partial").exists());
    }

    #[track_caller]
    fn expect_refused(&self, finished: Finished, part: &str) {
        self.expect_nothing_outside();
        let finished = finished.expect(1);
        assert!(finished.stderr.contains(part), "\"{part}\" is missing: {}", finished.stderr);
        assert!(!self.model().exists(), "a model that is not whole");
    }

    /// All that was written is in the cache, in the model's place or that of its partial download.
    #[track_caller]
    fn expect_nothing_outside(&self) {
        let files = files_under(self.folder.path());
        let outside = files.iter().find(|path| !path.starts_with(self.cache()));
        assert_eq!(outside, None, "written outside the cache");
        let organisation = self.cache().join("hub/org");
        for path in files {
            let inside = path.strip_prefix(&organisation).ok();
            let first = inside.and_then(|path| path.components().next());
            let first = first.map(|name| name.as_os_str().to_str().expect("UTF-8").to_owned());
            let ours = ["name", ".name.partial", ".name.lock"];
            let is_ours = first.is_some_and(|first| ours.contains(&first.as_str()));
            assert!(is_ours, "written: {}", path.display());
        }
    }
}

fn files_under(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(files_under(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[test]
fn a_model_is_pulled_whole_and_once() {
    let mut case = Case::with_shard("model-00001-of-00001.safetensors");
    *case.last() = json!({
        "rfilename": "model-00001-of-00001.safetensors",
        "size": WEIGHTS.len(),
        "lfs": {"sha256": SHA256, "size": WEIGHTS.len(), "pointerSize": 134},
    });
    case.files.remove("model.safetensors"); // not asked for
    let hub = case.hub();
    let finished = case.pull(&hub.address).expect(0);
    assert_eq!(finished.stdout.trim(), case.model().to_str().expect("UTF-8"));
    case.expect_whole();
    drop(hub);
    case.pull("http://127.0.0.1:1").expect(0);
}

#[test]
fn an_etag_is_not_a_path() {
    let outside = TempDir::new().expect("a folder");
    let absolute = outside.path().join("etag").to_str().expect("UTF-8").to_owned();
    for etag in [&absolute, "../../../../etag", "..", "a/../../../../../etag", ""] {
        let case = Case::new();
        let etag = format!("\"{etag}\"");
        let hub =
            case.hub_that(move |_, reply| reply.with("ETag", &etag).with("X-Linked-ETag", &etag));
        let finished = case.pull(&hub.address);
        assert_eq!(files_under(outside.path()), [] as [&Path; 0], "written outside");
        finished.expect(0);
        case.expect_whole();
    }
}

#[test]
fn a_revision_is_not_a_path() {
    for revision in ["../../../../../revision", "/revision", "", "main/../..", "0123\u{0}456789"] {
        let mut case = Case::new();
        case.listing["sha"] = revision.into();
        let finished = case.pull(&case.hub().address);
        case.expect_refused(finished, "revision");
    }
}

#[test]
fn a_shard_is_not_a_path() {
    let long = format!("{}.safetensors", "x".repeat(5000));
    for shard in [
        "../../../../shard.safetensors",
        "../../../../../shard.safetensors",
        "/shard.safetensors",
        "a/../../../../shard.safetensors",
        "a\\shard.safetensors",
        "a\u{0}.safetensors",
        ".safetensors",
        "..",
        "",
        "config.json",
        &long,
    ] {
        let case = Case::with_shard(shard);
        let finished = case.pull(&case.hub().address);
        case.expect_refused(finished, "which is no name of a shard");
    }
}

#[test]
fn a_link_in_the_way_is_not_followed() {
    let outside = TempDir::new().expect("a folder");
    let precious = outside.path().join("precious");
    fs::write(&precious, "precious").expect("a file");
    let case = Case::new();
    let partial = case.model().with_file_name(".name.partial");
    fs::create_dir_all(&partial).expect("a folder");
    fs::write(partial.join(".revision"), REVISION).expect("a note");
    std::os::unix::fs::symlink(&precious, partial.join("config.json.part")).expect("a link");
    case.pull(&case.hub().address).expect(0);
    case.expect_whole();
    assert_eq!(fs::read(&precious).expect("still there"), b"precious");

    let case = Case::new();
    fs::create_dir_all(case.cache().join("hub/org")).expect("a folder");
    let partial = case.model().with_file_name(".name.partial");
    std::os::unix::fs::symlink(outside.path(), &partial).expect("a link");
    case.pull(&case.hub().address).expect(0);
    case.expect_whole();
    assert_eq!(files_under(outside.path()), [precious]);
}

#[test]
fn a_file_that_is_not_what_was_listed_is_refused() {
    let check = |listed: Value, part: &str| {
        let mut case = Case::new();
        *case.last() = listed;
        let finished = case.pull(&case.hub().address);
        case.expect_refused(finished, part);
    };
    let name = "model.safetensors";
    check(json!({"rfilename": name, "size": WEIGHTS.len() - 1}), "longer than 35 bytes");
    check(json!({"rfilename": name, "size": WEIGHTS.len() + 1}), "ended after 36 of 37 bytes");
    let wrong = json!({"sha256": "0".repeat(64)});
    check(json!({"rfilename": name, "size": WEIGHTS.len(), "lfs": wrong}), SHA256);
    check(json!({"rfilename": name, "lfs": wrong}), SHA256);
    check(json!({"rfilename": "other"}), "has neither model.safetensors nor");
}

#[test]
fn a_download_that_broke_off_goes_on_where_it_stopped() {
    let mut case = Case::new();
    case.last()["size"] = WEIGHTS.len().into();
    case.last()["lfs"] = json!({"sha256": SHA256});
    let broken = case.hub_that(|file, mut reply| {
        if file == "model.safetensors" {
            reply.sent_max = Some(10);
        }
        reply
    });
    case.expect_refused(case.pull(&broken.address), "run again");
    let asked =
        broken.requests().into_iter().filter(|request| request.path.contains(".safetensors"));
    let ranges: Vec<_> = asked.map(|request| request.header("range").map(str::to_owned)).collect();
    assert_eq!(ranges, [None, Some("bytes=10-".to_owned()), Some("bytes=20-".to_owned())]);
    drop(broken);
    let hub = case.hub();
    case.pull(&hub.address).expect(0);
    case.expect_whole();
    let requests = hub.requests();
    let asked: Vec<&str> = requests.iter().map(|request| request.path.as_str()).collect();
    assert_eq!(asked.len(), 2, "the listing and the rest of the weights, not {asked:?}");
    assert_eq!(requests[1].header("range"), Some("bytes=30-"));
}

#[test]
fn what_is_left_of_another_revision_is_not_used() {
    let case = Case::new();
    let partial = case.model().with_file_name(".name.partial");
    fs::create_dir_all(&partial).expect("a folder");
    fs::write(partial.join(".revision"), "fedcba9876543210").expect("a note");
    fs::write(partial.join("config.json"), "of another revision").expect("a file");
    fs::write(partial.join("model.safetensors.part"), "of another").expect("a file");
    case.pull(&case.hub().address).expect(0);
    case.expect_whole();
}

#[test]
fn the_token_is_shown_to_the_hub_alone() {
    let case = Case::new();
    let elsewhere = case.hub();
    let target = elsewhere.address.clone();
    let hub = case.hub_that(move |file, reply| match file {
        "config.json" => Reply::status(302).with("Location", &format!("{target}/cdn/config.json")),
        "tokenizer.json" => Reply::status(307).with("Location", "/cdn/model.safetensors"),
        _ => reply,
    });
    fs::create_dir(case.folder.path().join("home")).expect("a folder");
    fs::write(case.folder.path().join("home/token"), "secret\n").expect("a token");
    let token = case.folder.path().join("home");
    case.pull(&hub.address).expect(0);
    fs::remove_dir_all(token).expect("the token is ours");
    assert_eq!(fs::read(case.model().join("config.json")).expect("a file"), b"{}");
    assert_eq!(fs::read(case.model().join("tokenizer.json")).expect("a file"), WEIGHTS);
    for request in hub.requests() {
        assert_eq!(request.header("authorization"), Some("Bearer secret"), "{}", request.path);
    }
    let others = elsewhere.requests();
    assert_eq!(others.len(), 1);
    assert_eq!(others[0].header("authorization"), None);
}

#[test]
fn a_hub_that_refuses_or_turns_in_circles_is_said() {
    let case = Case::new();
    let check = |hub: Hub, part: &str| case.expect_refused(case.pull(&hub.address), part);
    check(Hub::start(|_| Reply::status(401)), "HF_TOKEN");
    check(Hub::start(|_| Reply::status(404)), "there is no such model");
    check(Hub::start(|_| Reply::status(302).with("Location", "/round")), "without end");
    check(Hub::start(|_| Reply::status(302).with("Location", "file:///etc/passwd")), "not https");
    check(Hub::start(|_| Reply::ok(b"[]")), "list of files");
    case.expect_refused(case.pull("huggingface.co"), "HF_ENDPOINT");
}
