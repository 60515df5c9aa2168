//! The layer table: which crate may depend on which, development dependencies included.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::Finding;
use crate::command::cargo;

/// What a package of the workspace may depend on, of the workspace.
struct Layer {
    package: &'static str,
    may_use: Uses,
}

enum Uses {
    These(&'static [&'static str]),
    /// Test and benchmark code stands beside the layers and sees all of them.
    All,
}

/// The table of ARCHITECTURE.md. Change both in the same commit.
const LAYERS: &[Layer] = &[
    layer("amphora-hal", &[]),
    layer("amphora-cuda-kernels", &[]),
    layer("amphora-ascendc-kernels", &[]),
    layer("amphora-backend-cpu", &["amphora-hal"]),
    layer("amphora-backend-cuda", &["amphora-hal", "amphora-cuda-kernels"]),
    layer("amphora-backend-ascend", &["amphora-hal", "amphora-ascendc-kernels"]),
    layer(
        "amphora-ascend-twin",
        &["amphora-hal", "amphora-backend-cpu", "amphora-ascendc-kernels"],
    ),
    layer("amphora-model", &["amphora-hal"]),
    layer("amphora-engine", &["amphora-hal", "amphora-model"]),
    layer(
        "amphora-server",
        &[
            "amphora-hal",
            "amphora-model",
            "amphora-engine",
            "amphora-backend-cpu",
            "amphora-backend-cuda",
            "amphora-backend-ascend",
            "amphora-ascend-twin",
        ],
    ),
    Layer { package: "amphora-tests", may_use: Uses::All },
    Layer { package: "amphora-benches", may_use: Uses::All },
    layer("xtask", &[]),
];

/// Chosen by a feature wherever they are a dependency of `server`, `tests` or `benches`.
const CHOSEN_BY_FEATURE: &[&str] = &[
    "amphora-backend-cpu",
    "amphora-backend-cuda",
    "amphora-backend-ascend",
    "amphora-ascend-twin",
];
const CHOOSERS: &[&str] = &["amphora-server", "amphora-tests", "amphora-benches"];

const fn layer(package: &'static str, may_use: &'static [&'static str]) -> Layer {
    Layer { package, may_use: Uses::These(may_use) }
}

/// A dependency of one workspace package on another.
#[derive(Debug, Clone)]
struct Edge {
    from: String,
    to: String,
    manifest: PathBuf,
    optional: bool,
    dev: bool,
}

/// Reads `cargo metadata` and holds it against the table.
pub(super) fn check(root: &Path) -> Result<Vec<Finding>> {
    let output = cargo(root, "metadata --format-version 1 --no-deps")
        .output()
        .context("cannot start cargo metadata")?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    let metadata = serde_json::from_slice(&output.stdout).context("cargo metadata: not JSON")?;
    let (packages, edges) = read(&metadata, root).context("cargo metadata: unknown form")?;
    Ok(packages.iter().filter_map(unlisted).chain(edges.iter().filter_map(violation)).collect())
}

type Package = (String, PathBuf);

/// Packages and the edges between them; `None` if the JSON is not of cargo's form.
fn read(metadata: &Value, root: &Path) -> Option<(Vec<Package>, Vec<Edge>)> {
    let listed = metadata["packages"].as_array()?;
    let mut packages = Vec::new();
    for package in listed {
        let manifest = Path::new(package["manifest_path"].as_str()?);
        let manifest = manifest.strip_prefix(root).unwrap_or(manifest);
        packages.push((package["name"].as_str()?.to_owned(), manifest.to_path_buf()));
    }
    let mut edges = Vec::new();
    for (package, (from, manifest)) in listed.iter().zip(&packages) {
        for dependency in package["dependencies"].as_array()? {
            let to = dependency["name"].as_str()?;
            if packages.iter().any(|(name, _)| name == to) {
                edges.push(Edge {
                    from: from.clone(),
                    to: to.to_owned(),
                    manifest: manifest.clone(),
                    optional: dependency["optional"].as_bool()?,
                    dev: dependency["kind"] == "dev",
                });
            }
        }
    }
    Some((packages, edges))
}

fn unlisted((name, manifest): &Package) -> Option<Finding> {
    let known = LAYERS.iter().any(|layer| layer.package == name);
    (!known).then(|| Finding::error(manifest, 0, format!("{name} is not in the layer table")))
}

fn violation(edge: &Edge) -> Option<Finding> {
    let Edge { from, to, .. } = edge;
    let layer = LAYERS.iter().find(|layer| layer.package == from)?;
    let allowed = match layer.may_use {
        Uses::All => true,
        Uses::These(packages) => packages.contains(&to.as_str()),
    };
    if !allowed {
        let message = format!("{from} may not depend on {to} (layer table)");
        return Some(Finding::error(&edge.manifest, 0, message));
    }
    let chosen = CHOOSERS.contains(&from.as_str()) && CHOSEN_BY_FEATURE.contains(&to.as_str());
    if chosen && !edge.optional && !edge.dev {
        let message = format!("{from} must have {to} behind a feature (optional = true)");
        return Some(Finding::error(&edge.manifest, 0, message));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn edge(from: &str, to: &str) -> Edge {
        Edge {
            from: from.to_owned(),
            to: to.to_owned(),
            manifest: PathBuf::from("some/Cargo.toml"),
            optional: true,
            dev: false,
        }
    }

    #[test]
    fn edges_of_the_table_pass() {
        for (from, to) in [
            ("amphora-model", "amphora-hal"),
            ("amphora-server", "amphora-backend-cuda"),
            ("amphora-tests", "amphora-server"),
            ("amphora-benches", "amphora-tests"),
        ] {
            assert!(violation(&edge(from, to)).is_none(), "{from} → {to}");
        }
    }

    #[test]
    fn edges_outside_the_table_fail() {
        for (from, to) in [
            ("amphora-hal", "amphora-model"),
            ("amphora-model", "amphora-engine"),
            ("amphora-engine", "amphora-backend-cpu"),
            ("amphora-backend-cuda", "amphora-backend-cpu"),
            ("xtask", "amphora-hal"),
        ] {
            let finding = violation(&edge(from, to)).expect("an edge outside the table");
            assert!(finding.message.contains(to), "{finding}");
        }
    }

    #[test]
    fn development_dependencies_count() {
        let planted = Edge { dev: true, ..edge("amphora-engine", "amphora-backend-cpu") };
        assert!(violation(&planted).is_some());
    }

    #[test]
    fn a_backend_is_behind_its_feature() {
        let planted = Edge { optional: false, ..edge("amphora-server", "amphora-backend-cpu") };
        let finding = violation(&planted).expect("not optional");
        assert!(finding.message.contains("feature"), "{finding}");
    }

    #[test]
    fn metadata_gives_workspace_edges_only() {
        let metadata = json!({"packages": [
            {"name": "amphora-hal", "manifest_path": "/r/hal/Cargo.toml", "dependencies": [
                {"name": "half", "kind": null, "optional": false},
                {"name": "xtask", "kind": "dev", "optional": false},
            ]},
            {"name": "xtask", "manifest_path": "/r/xtask/Cargo.toml", "dependencies": []},
            {"name": "stranger", "manifest_path": "/r/stranger/Cargo.toml", "dependencies": []},
        ]});
        let (packages, edges) = read(&metadata, Path::new("/r")).expect("cargo's form");
        assert_eq!(edges.len(), 1);
        assert!(edges[0].dev && edges[0].to == "xtask");
        assert_eq!(edges[0].manifest, Path::new("hal/Cargo.toml"));
        assert_eq!(packages.iter().filter_map(unlisted).count(), 1);
    }
}
