//! Rules about the text of a file: length, leftovers, machine paths; in Rust sources also the head,
//! and where features and backends may be named.

use std::path::Path;

use super::source::{line_of, words};
use super::{Finding, Severity};

/// Past this a file is split.
const MOST_LINES: usize = 600;
/// Past this it is looked at twice.
const MANY_LINES: usize = 400;

const SOURCES: &[&str] = &["rs", "cu", "cuh", "cpp", "h", "py"];
/// Copied or generated sources, and tables of cases.
const UNMEASURED: &[&str] = &["assets", "tools/golden", "tests/golden", "tests/src/cases"];

/// Where a backend may be chosen.
const CHOOSERS: &[&str] = &["server/src/backend.rs", "tests", "benches", "fuzz"];
/// Crates that implement one or stand in for a device, and their folders.
const BACKENDS: &[(&str, &str)] = &[
    ("amphora_backend_cpu", "backend-cpu"),
    ("amphora_backend_cuda", "backend-cuda"),
    ("amphora_backend_ascend", "backend-ascend"),
    ("amphora_ascend_twin", "ascend-twin"),
];
/// The twin computes with the CPU's loops.
const TWIN: &str = "ascend-twin";

/// Text that ties the tree to one machine or one registry. Split, so as not to contain itself.
const FORBIDDEN: &[(&str, &str)] = &[
    ("/wo", "rk/"),
    ("/ro", "ot/"),
    ("/ho", "me/"),
    ("../sha", "red"),
    ("index.crates", ".io"),
    ("static.crates", ".io"),
    ("registry.npm", "js.org"),
    ("pypi", ".org/simple"),
    ("files.python", "hosted.org"),
];

/// Rules for every text file.
pub(super) fn check(file: &Path, contents: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    let source = file
        .extension()
        .and_then(|extension| extension.to_str())
        .is_some_and(|extension| SOURCES.contains(&extension));
    if source && !within(file, UNMEASURED) {
        findings.extend(length(file, contents.lines().count()));
        findings.extend(leftovers(file, contents));
    }
    if file != Path::new("Cargo.lock") {
        findings.extend(forbidden(file, contents));
    }
    findings
}

/// Rules for Rust; `code` is `contents` without comments and literals.
pub(super) fn check_rust(file: &Path, contents: &str, code: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    findings.extend(head(file, contents));
    findings.extend(stubs(file, code));
    if !within(file, CHOOSERS) {
        findings.extend(features(file, code));
        findings.extend(backend_names(file, code));
    }
    findings
}

fn within(file: &Path, folders: &[&str]) -> bool {
    folders.iter().any(|folder| file.starts_with(folder))
}

fn length(file: &Path, lines: usize) -> Option<Finding> {
    let (severity, limit) = if lines > MOST_LINES {
        (Severity::Error, MOST_LINES)
    } else if lines > MANY_LINES {
        (Severity::Warning, MANY_LINES)
    } else {
        return None;
    };
    Some(Finding {
        severity,
        file: file.to_path_buf(),
        line: 0,
        message: format!("{lines} lines, over {limit}: make it a folder of its own name"),
    })
}

fn leftovers(file: &Path, contents: &str) -> Vec<Finding> {
    let (fix, later) = (["FIX", "ME"].concat(), ["TO", "DO"].concat());
    let mut findings = Vec::new();
    for (number, line) in contents.lines().enumerate() {
        let unfiled = words(line, &later).any(|at| !line[at + later.len()..].starts_with("(#"));
        if unfiled || words(line, &fix).next().is_some() {
            let message = format!("{later} without an issue, or {fix}");
            findings.push(Finding::error(file, number + 1, message));
        }
    }
    findings
}

/// Paths and hosts of one machine.
pub(super) fn forbidden(file: &Path, contents: &str) -> Vec<Finding> {
    let patterns: Vec<String> = FORBIDDEN.iter().map(|(a, b)| [*a, *b].concat()).collect();
    let mut findings = Vec::new();
    for (number, line) in contents.lines().enumerate() {
        for pattern in patterns.iter().filter(|p| line.contains(p.as_str())) {
            let message = format!("`{pattern}`: a path or host of one machine");
            findings.push(Finding::error(file, number + 1, message));
        }
    }
    findings
}

/// A module says first what it is for; a build script may use plain comments.
fn head(file: &Path, contents: &str) -> Option<Finding> {
    let script = file.file_name().is_some_and(|name| name == "build.rs");
    let opening = if script { "//" } else { "//!" };
    (!contents.starts_with(opening)).then(|| {
        let message = format!("does not start with `{opening}` and what the file is for");
        Finding::error(file, 1, message)
    })
}

fn stubs(file: &Path, code: &str) -> Vec<Finding> {
    ["todo", "unimplemented"]
        .into_iter()
        .flat_map(|name| words(code, name).map(move |at| (name, at)))
        .filter(|(name, at)| code[at + name.len()..].starts_with('!'))
        .map(|(name, at)| Finding::error(file, line_of(code, at), format!("{name}! is a stub")))
        .collect()
}

/// `cfg`, `cfg!` and `cfg_attr` that ask for a feature.
fn features(file: &Path, code: &str) -> Vec<Finding> {
    ["cfg", "cfg_attr"]
        .into_iter()
        .flat_map(|name| words(code, name).map(move |at| (at, at + name.len())))
        .filter(|&(_, end)| {
            argument(&code[end..])
                .is_some_and(|condition| words(condition, "feature").next().is_some())
        })
        .map(|(at, _)| {
            let message = "features are asked for in server/src/backend.rs, tests and benches only";
            Finding::error(file, line_of(code, at), message)
        })
        .collect()
}

/// What stands in the parentheses that follow, an exclamation mark before them allowed.
fn argument(rest: &str) -> Option<&str> {
    let inside = rest.trim_start_matches('!').strip_prefix('(')?;
    let mut depth = 1;
    let end = inside.find(|c| {
        depth += match c {
            '(' => 1,
            ')' => -1,
            _ => 0,
        };
        depth == 0
    })?;
    Some(&inside[..end])
}

fn backend_names(file: &Path, code: &str) -> Vec<Finding> {
    BACKENDS
        .iter()
        .filter(|(name, folder)| {
            let lent = file.starts_with(TWIN) && *name == "amphora_backend_cpu";
            !file.starts_with(folder) && !lent
        })
        .flat_map(|(name, _)| words(code, name).map(move |at| (name, at)))
        .map(|(name, at)| {
            let message = format!("{name} is named outside server/src/backend.rs");
            Finding::error(file, line_of(code, at), message)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::source::code_only;
    use super::*;

    fn text(file: &str, contents: &str) -> Vec<Finding> {
        check(Path::new(file), contents)
    }

    fn rust(file: &str, body: &str) -> Vec<Finding> {
        let contents = format!("//! What it is for.\n{body}");
        check_rust(Path::new(file), &contents, &code_only(&contents))
    }

    #[test]
    fn long_files_are_found() {
        let severities = |file: &str, lines| {
            let found = text(file, &"x\n".repeat(lines));
            found.iter().map(|f| f.severity).collect::<Vec<_>>()
        };
        assert_eq!(severities("hal/src/plan.rs", 400), []);
        assert_eq!(severities("hal/src/plan.rs", 600), [Severity::Warning]);
        assert_eq!(severities("hal/src/plan.rs", 601), [Severity::Error]);
        assert_eq!(severities("kernels/a.cuh", 601), [Severity::Error]);
        assert_eq!(severities("tests/src/cases/linear.rs", 999), []);
        assert_eq!(severities("tools/golden/generate.py", 999), []);
        assert_eq!(severities("docs/long.md", 999), []);
    }

    #[test]
    fn leftovers_are_found() {
        let planted = ["// FIX", "ME later"].concat();
        assert_eq!(text("hal/src/plan.rs", &planted).len(), 1);
        let planted = ["# TO", "DO: more"].concat();
        assert_eq!(text("tools/a.py", &planted).len(), 1);
        let filed = ["// TO", "DO(#12): more"].concat();
        assert_eq!(text("hal/src/plan.rs", &filed), []);
    }

    #[test]
    fn paths_and_hosts_of_one_machine_are_found() {
        for (a, b) in FORBIDDEN {
            let planted = format!("see\n{a}{b}x");
            assert_eq!(text("README.md", &planted)[0].line, 2);
            assert_eq!(text("Cargo.lock", &planted), []);
        }
        assert_eq!(text("README.md", "--work work/eval, framework/x"), []);
    }

    #[test]
    fn a_file_without_a_head_is_found() {
        let head = |file: &str, contents: &str| head(Path::new(file), contents).is_some();
        assert!(head("hal/src/plan.rs", "use x;\n"));
        assert!(head("hal/src/plan.rs", "// plain\n"));
        assert!(!head("hal/src/plan.rs", "//! Plans.\n"));
        assert!(!head("hal/build.rs", "// Makes it.\n"));
    }

    #[test]
    fn stubs_are_found() {
        let planted = ["fn f() { to", "do!() }\nfn g() { unimple", "mented!() }"].concat();
        let found = rust("hal/src/plan.rs", &planted);
        assert_eq!(found.iter().map(|f| f.line).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(rust("hal/src/plan.rs", "fn todo() {}"), []);
    }

    #[test]
    fn features_outside_their_place_are_found() {
        for planted in [
            "#[cfg(feature = \"cpu\")]",
            "#[cfg(all(\n    test,\n    feature = \"cpu\"\n))]",
            "if cfg!(feature = \"cpu\") {}",
            "#[cfg_attr(not(feature = \"cpu\"), allow(dead_code))]",
        ] {
            assert_eq!(rust("engine/src/lib.rs", planted).len(), 1, "{planted}");
            assert_eq!(rust("server/src/backend.rs", planted), []);
            assert_eq!(rust("tests/e2e.rs", planted), []);
            assert_eq!(rust("benches/ops.rs", planted), []);
        }
        for fine in ["#[cfg(test)]", "#[cfg(target_feature = \"avx2\")]", "// cfg(feature)"] {
            assert_eq!(rust("engine/src/lib.rs", fine), [], "{fine}");
        }
    }

    #[test]
    fn backends_outside_their_place_are_found() {
        let planted = "use amphora_backend_cpu::Cpu;";
        assert_eq!(rust("engine/src/lib.rs", planted).len(), 1);
        assert_eq!(rust("backend-cuda/src/lib.rs", planted).len(), 1);
        assert_eq!(rust("server/src/demo.rs", planted).len(), 1);
        for file in [
            "server/src/backend.rs",
            "tests/conformance_cpu.rs",
            "backend-cpu/src/lib.rs",
            "ascend-twin/src/lib.rs",
        ] {
            assert_eq!(rust(file, planted), [], "{file}");
        }
    }
}
