//! Numbers with units, as people write and read them.

use std::time::Duration;

/// Parses a size such as `4GiB`, `500MB` or `1048576`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split(text)?;
    let factor: u64 = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        _ => return Err(unknown(text, unit, "B, KiB, MiB, GiB, KB, MB or GB")),
    };
    scaled(number, factor).ok_or_else(|| format!("{text} is not a size this machine could have"))
}

/// Checks an address such as `10.0.0.1:7070`, `[::1]:7070` or `name:7070`.
pub fn parse_address(text: &str) -> Result<String, String> {
    let port = text.rsplit_once(':').filter(|(host, _)| !host.is_empty());
    match port.map(|(_, port)| port.parse::<u16>()) {
        Some(Ok(_)) => Ok(text.to_owned()),
        _ => Err("an address is HOST:PORT, such as 10.0.0.1:7070".to_owned()),
    }
}

/// Parses a number of hours: above zero, and finite.
pub fn parse_hours(text: &str) -> Result<f64, String> {
    let hours: f64 = text.parse().map_err(|_| "not a number of hours".to_owned())?;
    if hours.is_finite() && hours > 0.0 {
        return Ok(hours);
    }
    Err("must be above 0".to_owned())
}

/// Parses cores of each Tier-1 and of each Tier-2 process, such as `12,4`; `4` is both.
pub fn parse_cores(text: &str) -> Result<(u32, u32), String> {
    let count = |text: &str| text.parse().ok().filter(|count| (1..=4096).contains(count));
    let (tier1, tier2) = text.split_once(',').unwrap_or((text, text));
    let cores = count(tier1).zip(count(tier2));
    cores.ok_or_else(|| "must be one or two numbers of cores, such as 12,4".to_owned())
}

/// Parses a sampling temperature.
pub fn parse_temperature(text: &str) -> Result<f32, String> {
    let value = text.parse().ok().filter(|value| (0.0..=2.0).contains(value));
    value.ok_or_else(|| "must be a number from 0 to 2".to_owned())
}

/// Parses a duration such as `20ms`, `1.5s`, `250us` or `5min`.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text)?;
    let seconds = match unit.to_ascii_lowercase().as_str() {
        "us" | "µs" => number / 1e6,
        "ms" => number / 1e3,
        "s" => number,
        "min" => number * 60.0,
        "h" => number * 3600.0,
        _ => return Err(unknown(text, unit, "us, ms, s, min or h")),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("{text} is too long"))
}

/// Parses a rate such as `1gbit`, `1Gbps` or `50MB` (per second) into bytes per second. A small b is bits, as everywhere; one
/// by itself is refused, because not everybody means that.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    const UNITS: &str = "kbit, mbit, gbit, KB, MB or GB";
    let (number, unit) = split(text)?;
    let bare = unit.strip_suffix("/s").or_else(|| unit.strip_suffix("ps")).unwrap_or(unit);
    let (kilo, of) = bare.split_at_checked(1).ok_or_else(|| unknown(text, unit, UNITS))?;
    let bytes: u64 = match kilo {
        "k" | "K" => 1_000,
        "m" | "M" => 1_000_000,
        "g" | "G" => 1_000_000_000,
        _ => return Err(unknown(text, unit, UNITS)),
    };
    let factor = match of {
        "B" => bytes,
        "b" if unit.ends_with("ps") => bytes / 8,
        "b" => {
            let (bits, bytes) = (kilo.to_lowercase(), kilo.to_uppercase());
            return Err(format!("{text} could be bits or bytes: use {bits}bit or {bytes}B"));
        }
        _ if of.eq_ignore_ascii_case("bit") => bytes / 8,
        _ => return Err(unknown(text, unit, UNITS)),
    };
    scaled(number, factor).ok_or_else(|| format!("{text} is not a rate a link could have"))
}

fn split(text: &str) -> Result<(f64, &str), String> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number = number.parse().map_err(|_| format!("\"{text}\" does not begin with a number"))?;
    Ok((number, unit.trim()))
}

fn unknown(text: &str, unit: &str, units: &str) -> String {
    match unit {
        "" => format!("{text} has no unit: use {units}"),
        _ => format!("unknown unit \"{unit}\": use {units}"),
    }
}

fn scaled(number: f64, factor: u64) -> Option<u64> {
    let value = number * factor as f64;
    (value >= 1.0 && value < u64::MAX as f64).then_some(value as u64)
}

/// A size for people: `1.5 GiB`.
pub fn bytes(count: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// A duration for people: `850 ms`, `12.3 s`, `4 min 05 s`, `2 h 03 min`.
pub fn seconds(value_s: f64) -> String {
    let whole = value_s.round() as u64;
    match value_s {
        _ if value_s < 1.0 => format!("{:.0} ms", value_s * 1e3),
        _ if value_s < 60.0 => format!("{value_s:.1} s"),
        _ if value_s < 3600.0 => format!("{} min {:02} s", whole / 60, whole % 60),
        _ => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
    }
}

/// A forecast for people, rounded to what it can promise: `12 s`, `4 min 05 s`.
pub fn whole_seconds(value_s: f64) -> String {
    let value_s = value_s.ceil();
    if value_s < 60.0 { format!("{value_s:.0} s") } else { seconds(value_s) }
}

/// A count of things for people: `1 line`, `1,234 lines`.
pub fn counted(value: u64, thing: &str) -> String {
    format!("{} {thing}{}", count(value), if value == 1 { "" } else { "s" })
}

/// A count for people: `1,234,567`.
pub fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_parsed() {
        assert_eq!(parse_cores("12,4"), Ok((12, 4)));
        assert_eq!(parse_cores("3"), Ok((3, 3)));
        for wrong in ["", "0,1", "1,2,3", "4,", "all"] {
            assert!(parse_cores(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn sizes_are_parsed() {
        let cases = [
            ("4GiB", 4 << 30),
            ("1.5k", 1536),
            ("500MB", 500_000_000),
            ("17", 17),
            ("2 g", 2 << 30),
        ];
        for (text, expected) in cases {
            assert_eq!(parse_bytes(text), Ok(expected), "{text}");
        }
        for text in ["", "GiB", "4 parsecs", "0", "-1", "99999999999TiB"] {
            assert!(parse_bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn temperatures_are_parsed() {
        assert_eq!(parse_temperature("0.7"), Ok(0.7));
        for text in ["", "-1", "2.1", "NaN", "warm"] {
            assert!(parse_temperature(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_and_rates_are_parsed() {
        assert_eq!(parse_duration("20ms"), Ok(Duration::from_millis(20)));
        assert_eq!(parse_duration("1.5s"), Ok(Duration::from_millis(1500)));
        assert_eq!(parse_duration("250us"), Ok(Duration::from_micros(250)));
        assert_eq!(parse_duration("2 min"), Ok(Duration::from_secs(120)));
        assert_eq!(parse_duration("1h"), Ok(Duration::from_secs(3600)));
        assert_eq!(parse_rate("1gbit"), Ok(125_000_000));
        assert_eq!(parse_rate("200Mbit/s"), Ok(25_000_000));
        assert_eq!(parse_rate("50MB"), Ok(50_000_000));
        assert_eq!(parse_rate("50 MB/s"), Ok(50_000_000));
        assert_eq!(parse_rate("1GBps"), Ok(1_000_000_000));
        for text in ["1Gbps", "1gbps", "1Gbit", "1000mbit"] {
            assert_eq!(parse_rate(text), Ok(125_000_000), "{text}");
        }
        for (text, said) in [("1gb", "use gbit or GB"), ("10Mb/s", "use mbit or MB")] {
            assert!(parse_rate(text).is_err_and(|error| error.contains(said)), "{text}");
        }
        for text in ["20", "ms", "5 years"] {
            assert!(parse_duration(text).is_err() && parse_rate(text).is_err(), "{text}");
        }
        assert_eq!(parse_duration("5"), Err("5 has no unit: use us, ms, s, min or h".to_owned()));
    }

    #[test]
    fn numbers_are_readable() {
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(17), "17 B");
        assert_eq!(seconds(0.25), "250 ms");
        assert_eq!(seconds(245.0), "4 min 05 s");
        assert_eq!(whole_seconds(0.4), "1 s");
        assert_eq!(whole_seconds(244.1), "4 min 05 s");
        assert_eq!(count(1_234_567), "1,234,567");
        assert_eq!(count(999), "999");
        assert_eq!(counted(1, "line"), "1 line");
        assert_eq!(counted(1000, "line"), "1,000 lines");
    }
}
