//! The profiles of this machine and its GPUs that were kept for later forecasts.

use crate::error::{LaunchError, counted};
use crate::news::{LaunchNews, Tell};
use glinthawk_compute::Isa;
use glinthawk_compute::cuda::CudaDevice;
use glinthawk_model::ModelConfig;
use glinthawk_model::catalogue::cache_folder;
use glinthawk_plan::Profile;
use glinthawk_plan::profile::Provenance;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Keeps a profile where forecasts look for it; returns the file.
pub fn keep_profile(config: &ModelConfig, profile: &Profile) -> Result<PathBuf, LaunchError> {
    let path = path(config, &profile.provenance)?;
    profile.write(&path)?;
    Ok(path)
}

/// The profile for such a model that was taken of the same thing by the same version, if there is one.
pub(crate) fn kept(config: &ModelConfig, provenance: &Provenance) -> Option<Profile> {
    Profile::read(&path(config, provenance).ok()?).ok()
}

/// Tells of profiles for such a model that were kept and cannot be read, so that no forecast will use them.
pub fn tell_damaged_profiles(config: &ModelConfig, tell: Tell<'_>) {
    let Ok(files) = folder().map(std::fs::read_dir) else { return };
    let kept = files.into_iter().flatten().flatten().map(|file| file.path());
    let prefix = format!("{} ", widths(config));
    let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let version = concat!(" ", env!("CARGO_PKG_VERSION"), ".json");
    let is_ours = |name: String| name.starts_with(&prefix) && name.ends_with(version);
    for path in kept.filter(|path| name(path).is_some_and(is_ours)) {
        if let Err(error) = Profile::read(&path) {
            tell(LaunchNews::DamagedProfile(&error));
        }
    }
}

fn folder() -> Result<PathBuf, LaunchError> {
    let folder = cache_folder()?.join("profiles");
    if let Err(source) = std::fs::create_dir_all(&folder) {
        return Err(LaunchError::ProfileFolder { folder, source });
    }
    Ok(folder)
}

/// The widths rather than the model's name: they are what kernel times depend on.
fn widths(config: &ModelConfig) -> String {
    let ModelConfig { hidden, feed_forward, vocab, .. } = config;
    let (query_width, kv_width) = (config.query_width(), config.kv_width());
    format!("{hidden}-{query_width}-{kv_width}-{feed_forward}-{vocab}")
}

fn path(config: &ModelConfig, provenance: &Provenance) -> Result<PathBuf, LaunchError> {
    let machine: String = provenance
        .machine
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' })
        .collect();
    let Provenance { instruction_set, threads, version, .. } = provenance;
    let widths = widths(config);
    Ok(folder()?.join(format!("{widths} {instruction_set}-{threads} {machine} {version}.json")))
}

/// This machine, as profiles name it.
pub(crate) fn machine() -> String {
    let information = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = information.lines().find_map(|line| line.strip_prefix("model name"));
    let name = name.map_or("a machine", |name| name.trim_start_matches([' ', '\t', ':']));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    format!("{name}, {}", counted(cores, "core"))
}

/// This machine's cores, and who measures when.
pub(crate) fn of_cores(isa: Isa, threads: usize) -> Provenance {
    provenance(machine(), isa.name().to_owned(), threads)
}

/// A GPU, and who measures when.
pub(crate) fn of_device(device: &CudaDevice) -> Provenance {
    provenance(device.name().to_owned(), device.kind(), 1)
}

fn provenance(machine: String, instruction_set: String, threads: usize) -> Provenance {
    Provenance {
        machine,
        instruction_set,
        threads,
        date: date(SystemTime::now()),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

/// A day in ISO 8601, in universal time: `2026-11-15`.
fn date(time: SystemTime) -> String {
    let days = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 86_400);
    // Years begin in March here, so that a leap day is the last of its year; 400 of them repeat.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    format!("{}-{month:02}-{day:02}", era * 400 + year + next)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn days_are_named() {
        let cases = [
            (0, "1970-01-01"),
            (951_782_400, "2000-02-29"),
            (1_709_251_199, "2024-02-29"),
            (1_794_700_800, "2026-11-15"),
        ];
        for (seconds, expected) in cases {
            assert_eq!(date(UNIX_EPOCH + Duration::from_secs(seconds)), expected);
        }
    }
}
