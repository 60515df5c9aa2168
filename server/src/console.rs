//! Lines for people. What a command is asked for goes to standard output, what it says about itself
//! to standard error, unless the command is nothing but a report.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::SubscriberBuilder;
use tracing_subscriber::fmt::format::{DefaultFields, Format, Full};

/// Where a line goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Voice {
    Out,
    Err,
}

impl Voice {
    /// Writes one line at once. `println!` would panic when the reader has gone.
    pub fn line(self, text: impl Display) -> std::io::Result<()> {
        match self {
            Self::Out => {
                let mut out = std::io::stdout().lock();
                writeln!(out, "{text}")?;
                out.flush()
            }
            Self::Err => writeln!(std::io::stderr().lock(), "{text}"),
        }
    }
}

/// Writes warnings of the layers below, such as a folder of compiled kernels that cannot be written, to
/// standard error, a line each.
pub fn tell_warnings() {
    // Fails where somebody listens already, and they are told then.
    let _ = warnings(std::io::stderr).try_init();
}

fn warnings<W>(to: W) -> SubscriberBuilder<DefaultFields, Format<Full, ()>, LevelFilter, W>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    tracing_subscriber::fmt()
        .with_max_level(LevelFilter::WARN)
        .with_target(false)
        .with_ansi(false)
        .without_time()
        .with_writer(to)
}

/// A spinner beside `text` while something takes its time; nothing when standard error is no terminal.
pub fn spinner(text: String) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new_spinner().with_message(text);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

/// A bar of bytes whose length is told later; nothing when standard error is no terminal.
pub fn byte_bar(what: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(0).with_message(what.to_owned());
    // The built-in style stays if this one should ever not parse.
    if let Ok(style) = ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes}") {
        bar.set_style(style);
    }
    bar
}

/// A bar that counts to `total`; nothing when standard error is no terminal.
pub fn counter(total: usize, what: &'static str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(total as u64).with_message(what);
    // The built-in style stays if this one should ever not parse.
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    bar
}

/// A number with thousands separated.
pub fn grouped(number: usize) -> String {
    let digits = number.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::grouped;

    #[test]
    fn thousands_are_separated() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1000), "1,000");
        assert_eq!(grouped(12_345_678), "12,345,678");
    }
}
