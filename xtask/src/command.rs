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

/// Whether there is a C++ compiler by the name that build scripts use.
pub fn has_cxx() -> bool {
    let mut probe = Command::new("c++");
    probe.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
    probe.status().is_ok_and(|status| status.success())
}
