//! Values of flags: what they may be, and how their errors say so.

use super::NamedFolder;

/// `NAME=DIR`; a name may hold "/" but not "=".
pub fn named_folder(text: &str) -> Result<NamedFolder, String> {
    match text.split_once('=') {
        Some((name, folder)) if !name.is_empty() && !folder.is_empty() => {
            Ok(NamedFolder { name: name.to_owned(), folder: folder.into() })
        }
        _ => Err("expected NAME=DIR".to_owned()),
    }
}

/// More threads than any machine has cores would take minutes to start and gain nothing.
const MOST_THREADS: usize = 1024;

pub fn thread_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if (1..=MOST_THREADS).contains(&count) => Ok(count),
        _ => Err(format!("expected a number of threads from 1 to {MOST_THREADS}")),
    }
}

pub fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number of at least 1".to_owned()),
        Ok(number) => Ok(number),
    }
}

pub fn from_one<const MOST: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (1..=MOST).contains(&number) => Ok(number),
        _ => Err(format!("expected a whole number from 1 to {MOST}")),
    }
}

pub fn at_most<const MOST: usize>(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number <= MOST => Ok(number),
        _ => Err(format!("expected a whole number from 0 to {MOST}")),
    }
}

/// A number of bytes, with or without a unit: `4096`, `64KiB`, `1.5GiB`, `2GB`.
pub fn bytes(text: &str) -> Result<usize, String> {
    const UNITS: [(&str, u64); 7] = [
        ("KiB", 1 << 10),
        ("MiB", 1 << 20),
        ("GiB", 1 << 30),
        ("KB", 1_000),
        ("MB", 1_000_000),
        ("GB", 1_000_000_000),
        ("B", 1),
    ];
    let (digits, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| Some((text.strip_suffix(name)?, *unit)))
        .unwrap_or((text, 1));
    match digits.trim().parse::<f64>() {
        Ok(number) if number > 0.0 && number * (unit as f64) < 2_f64.powi(53) => {
            Ok((number * unit as f64) as usize)
        }
        _ => Err("expected a size such as 256MiB or 2GB".to_owned()),
    }
}

pub fn above_zero(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("expected a number above 0".to_owned()),
    }
}

pub fn tolerance(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number >= 0.0 => Ok(number),
        _ => Err("expected a number of at least 0".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("64KiB"), Ok(65_536));
        assert_eq!(bytes("1.5 GiB"), Ok(3 << 29));
        assert_eq!(bytes("2GB"), Ok(2_000_000_000));
        for wrong in ["", "0", "-1", "x", "5TiB", "1e40", "NaN", "MiB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
