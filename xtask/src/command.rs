//! Starting cargo: the one that started us, at the workspace root, without input.

use std::path::Path;
use std::process::{Command, Stdio};

/// A cargo command with the arguments in `line`, separated by spaces.
pub fn cargo(root: &Path, line: &str) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(line.split_whitespace()).current_dir(root).stdin(Stdio::null());
    command
}
