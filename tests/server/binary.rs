//! The binary: built once, run to its end, or started as a server.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Longer than anything here takes on a busy machine: past it a process or a reply is held to hang.
pub const HANGS: Duration = Duration::from_secs(300);

/// Names a binary to test in place of the one built from this checkout, such as a release build.
const READY_MADE: &str = "AMPHORA_TEST_BINARY";

/// The workspace's root.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The binary. Cargo builds it for no test of another package, so the first who asks builds it.
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| std::env::var_os(READY_MADE).map_or_else(build, PathBuf::from))
}

/// Builds in the profile that this test was built in.
fn build() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    // target/<profile's folder>/deps/<this test>
    let folder = test.parent().and_then(Path::parent).and_then(Path::file_name).unwrap();
    let profile = if folder == "debug" { OsString::from("dev") } else { folder.to_owned() };
    let built = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--package", "amphora-server", "--bin", "amphora"])
        .args(["--quiet", "--message-format", "json", "--profile"])
        .arg(profile)
        .current_dir(root())
        .stderr(Stdio::inherit())
        .output()
        .expect("cargo runs");
    assert!(built.status.success(), "the binary does not build");
    let messages = String::from_utf8(built.stdout).unwrap();
    let mut executable = messages.lines().filter_map(|line| {
        let message: serde_json::Value = serde_json::from_str(line).ok()?;
        message["executable"].as_str().map(PathBuf::from)
    });
    executable.next_back().expect("cargo names what it built")
}

/// The binary with these arguments, and with no setting from the surroundings.
pub fn command<S: AsRef<str>>(args: &[S]) -> Command {
    let mut command = Command::new(binary());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("AMPHORA_") {
            command.env_remove(name);
        }
    }
    command.args(args.iter().map(AsRef::as_ref)).current_dir(root()).stdin(Stdio::null());
    command
}

/// What a process left behind.
#[derive(Debug)]
pub struct Ended {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl Ended {
    /// Neither success, nor a panic's exit code, nor a signal; one line that names what is wrong,
    /// after the one that says which device was opened.
    pub fn assert_refused(&self, names: &[&str]) {
        let code = self.status.code();
        assert!(code.is_some_and(|code| code != 0 && code != 101), "{self:?}");
        let lines: Vec<&str> =
            self.err.lines().filter(|line| !line.starts_with("backend ")).collect();
        assert_eq!(lines.len(), 1, "an error is one line: {self:?}");
        assert!(lines[0].starts_with("error: "), "{self:?}");
        for name in names {
            assert!(lines[0].contains(name), "the error does not name '{name}': {self:?}");
        }
    }

    /// A flag or its value was refused, in a first line with these texts, before anything ran.
    pub fn assert_usage(&self, names: &[&str]) {
        assert_eq!(self.status.code(), Some(2), "{self:?}");
        let line = self.err.lines().next().unwrap_or_default();
        for name in names {
            assert!(line.contains(name), "the error does not name '{name}': {self:?}");
        }
    }
}

/// Runs the binary to its end.
pub fn run<S: AsRef<str>>(args: &[S]) -> Ended {
    let output = command(args).output().expect("the binary runs");
    let text = |bytes| String::from_utf8(bytes).expect("output is UTF-8");
    let ended = Ended { status: output.status, out: text(output.stdout), err: text(output.stderr) };
    assert!(!ended.err.contains("panicked"), "{ended:?}");
    ended
}

/// `amphora serve` on a port of its own. It ends with this value, and with the test's process.
pub struct Server {
    pub address: SocketAddr,
    child: Child,
    /// Lines that it prints to standard output, behind those of `start`.
    out: Mutex<Receiver<String>>,
    err: Arc<Mutex<String>>,
    /// Lines up to the one that says where it listens.
    pub start: Vec<String>,
    _watch: Watch,
}

impl Server {
    /// Returns once it listens. A backend may have kernels to compile first, which is part of [`HANGS`].
    pub fn start(args: &[&str]) -> Self {
        let mut child = command(&[&["serve", "--port", "0"], args].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary runs");
        let watch = Watch::over(&child);
        let err = Arc::new(Mutex::new(String::new()));
        collect(child.stderr.take().unwrap(), err.clone());
        let out = lines(child.stdout.take().unwrap());
        let begun = Instant::now();
        let mut start: Vec<String> = Vec::new();
        let address = loop {
            match out.recv_timeout(HANGS.saturating_sub(begun.elapsed())) {
                Ok(line) => start.push(line),
                Err(why) => {
                    let said = format!("{}\n{}", start.join("\n"), err.lock().unwrap());
                    if why == RecvTimeoutError::Timeout {
                        let _ = child.kill(); // It is told of below either way.
                        panic!("after {HANGS:?} it does not listen; it said:\n{said}");
                    }
                    panic!("it ended before it listened: {:?}; it said:\n{said}", child.wait());
                }
            }
            if let Some(url) =
                start.last().and_then(|line| line.strip_prefix("listening on http://"))
            {
                break url.parse().expect("an address");
            }
        };
        Self { address, child, out: Mutex::new(out), err, start, _watch: watch }
    }

    /// One server of the demo model in f32 for all tests that do not mind company.
    pub fn shared() -> &'static Self {
        static SHARED: OnceLock<Server> = OnceLock::new();
        SHARED.get_or_init(|| Self::start(&[]))
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        let sent = Command::new("sh").args(["-c", &format!("kill -{name} {pid}")]).status();
        assert!(sent.is_ok_and(|status| status.success()), "signal {name} is sent");
    }

    /// Waits until the process has ended.
    pub fn wait(mut self) -> Ended {
        let (rest, begun) = (self.out.get_mut().unwrap(), Instant::now());
        let mut out: Vec<String> = Vec::new();
        loop {
            match rest.recv_timeout(HANGS.saturating_sub(begun.elapsed())) {
                Ok(line) => out.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    panic!("after {HANGS:?} it does not end: {out:?}")
                }
            }
        }
        let out = out.join("\n");
        let status = self.child.wait().unwrap();
        let ended = Ended { status, out, err: self.errors() };
        assert!(!ended.err.contains("panicked"), "{ended:?}");
        ended
    }

    /// What it has written to standard error so far.
    pub fn errors(&self) -> String {
        self.err.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only where the process has ended before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lines as they come; the end of the channel is the end of the stream.
fn lines(stdout: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // The test may have given up waiting; what is printed is read all the same, or the process
            // would stop at a full pipe.
            let _ = sender.send(line);
        }
    });
    lines
}

fn collect(stderr: impl Read + Send + 'static, into: Arc<Mutex<String>>) {
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            let mut text = into.lock().unwrap();
            text.push_str(&line);
            text.push('\n');
        }
    });
}

/// Kills a process when this one ends, in whatever way: a shell waits at the other end of a pipe.
/// Values in a `static` are never dropped, and a test may be killed.
struct Watch {
    shell: Child,
    pipe: Option<ChildStdin>,
}

impl Watch {
    fn over(child: &Child) -> Self {
        let mut shell = Command::new("sh")
            .args(["-c", "read -r line; [ -n \"$line\" ] || kill -KILL \"$0\""])
            .arg(child.id().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh runs");
        let pipe = shell.stdin.take();
        Self { shell, pipe }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        use std::io::Write;
        // The process was waited for, so its number may be another's by now: a line calls the shell off.
        if let Some(mut pipe) = self.pipe.take() {
            let _ = pipe.write_all(b"done\n");
        }
        let _ = self.shell.wait();
    }
}
