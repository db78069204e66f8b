//! The binary that is tested.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The `ondeck` binary of this build. Cargo hands a test only the binaries of its own package, so it is asked to build
/// this one too: a matter of a moment if it is up to date.
pub fn ondeck_binary() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        // TARGET_DIR/TRIPLE/PROFILE/deps/conformance-HASH
        let this = std::env::current_exe().unwrap();
        let profile_dir = this.ancestors().nth(2).unwrap();
        let target_dir = profile_dir.ancestors().nth(2).unwrap();
        let profile = match profile_dir.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            other => other,
        };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let mut build = Command::new(cargo);
        build.args(["build", "--locked", "--quiet", "-p", "ondeck", "--profile", profile, "--target-dir"]);
        let output = build.arg(target_dir).current_dir(workspace).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "can't build ondeck: {}",
            said.lines().rev().take(30).collect::<Vec<_>>().join("\n")
        );
        profile_dir.join("ondeck")
    })
}
