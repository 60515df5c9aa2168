//! Kernels to machine code: a unit that names its constants, the runtime compiler, and a cache.
//!
//! Compiling needs no GPU, and a cache that holds every unit of an architecture needs no compiler.

mod cache;
mod spills;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use amphora_cuda_kernels::{Elements, FILES, File, Source, included};
use amphora_hal::{DType, Error, Result};

use crate::driver::OUT_OF_MEMORY;
use crate::driver::nvrtc::{self, Compiler, Program};
use crate::heuristics::{self, MAX_HEAD, PRODUCT, StreamTile, WarpTile};
use cache::{Cache, Digest};

pub use spills::Spill;

/// Options beside the architecture. Fused multiply-adds are written where they are wanted, and nothing
/// here trades accuracy for speed. The last makes the assembler say what it spills.
const OPTIONS: [&str; 3] = ["--std=c++17", "-default-device", "--ptxas-options=-v"];

/// Where the compiler and the cache are.
#[derive(Debug, Clone, Default)]
pub struct JitConfig {
    /// Folder of the compiler's libraries; `None`: the loader's own search.
    pub nvrtc_dir: Option<PathBuf>,
    /// Folder of cuBLASLt; `None`: the loader's own search.
    pub cublaslt_dir: Option<PathBuf>,
    /// Folder of compiled kernels; `None`: nothing is kept.
    pub cache_dir: Option<PathBuf>,
    /// Whether the vendor's profilers are told what runs (`AMPHORA_NVTX`).
    pub nvtx: bool,
}

impl JitConfig {
    /// `AMPHORA_NVRTC_DIR`, `AMPHORA_CUBLASLT_DIR`, `AMPHORA_NVTX` (anything but 0), and
    /// `AMPHORA_KERNEL_CACHE`, else a folder in the user's cache. Read once, when a device is opened.
    pub fn from_environment() -> Self {
        let folder =
            |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let user = || {
            let base = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
            Some(base.join("amphora").join("kernels"))
        };
        JitConfig {
            nvrtc_dir: folder("AMPHORA_NVRTC_DIR"),
            cublaslt_dir: folder("AMPHORA_CUBLASLT_DIR"),
            cache_dir: folder("AMPHORA_KERNEL_CACHE").or_else(user),
            nvtx: folder("AMPHORA_NVTX").is_some_and(|value| value.as_os_str() != "0"),
        }
    }
}

/// What is compiled at once: a source at an element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unit {
    pub(crate) source: Source,
    /// `None`: the source's operands have fixed types.
    pub(crate) element: Option<DType>,
    /// The constants of a source that is compiled for several.
    pub(crate) variant: Option<Variant>,
}

/// Constants that a source may be compiled with; others than the first are when they are first used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Variant {
    /// A weight stream.
    Stream(StreamTile),
    /// Expert products of warps.
    Warps(WarpTile),
    /// Dense products by tiles, with masks along k or without.
    Tiles { even_k: bool },
}

impl Variant {
    /// The one that a source has from the start, if it is compiled for several.
    fn first(source: Source) -> Option<Self> {
        match source {
            Source::FusedMoePrefillMma => Some(Variant::Warps(WarpTile::DEFAULT)),
            Source::LinearTile => Some(Variant::Tiles { even_k: false }),
            _ => None,
        }
    }

    /// Whether it is there from the start.
    pub(crate) fn is_first(self, source: Source) -> bool {
        Self::first(source) == Some(self)
    }

    /// Names and values in the unit's text.
    pub(crate) fn constants(&self) -> Vec<(&'static str, usize)> {
        match self {
            Variant::Stream(tile) => tile.constants().to_vec(),
            Variant::Warps(tile) => tile.constants().to_vec(),
            Variant::Tiles { even_k } => vec![("kEvenK", usize::from(*even_k))],
        }
    }

    /// What tells it from others in a name.
    fn suffix(&self) -> String {
        match self {
            Variant::Stream(tile) => tile.width.to_string(),
            Variant::Warps(tile) => format!("{}x{}", tile.tokens, tile.stages),
            Variant::Tiles { even_k: false } => "masked".to_owned(),
            Variant::Tiles { even_k: true } => "even".to_owned(),
        }
    }
}

/// The element types that sources are compiled for.
pub(crate) const ELEMENTS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

impl Unit {
    /// Every unit that a device has from the start.
    pub(crate) fn all() -> Vec<Unit> {
        let unit = |source, element| Unit { source, element, variant: Variant::first(source) };
        let of = |source: Source| match source.elements() {
            Elements::Each => ELEMENTS.map(|dtype| unit(source, Some(dtype))).to_vec(),
            Elements::Half => {
                [DType::F16, DType::BF16].map(|dtype| unit(source, Some(dtype))).to_vec()
            }
            Elements::Once => vec![unit(source, None)],
            Elements::Stream => Vec::new(),
        };
        Source::ALL.iter().flat_map(|&source| of(source)).collect()
    }

    /// The units of weight streams that are compiled ahead; others are when they are first used.
    fn ahead(architecture: &str, widths: &[usize]) -> Vec<Unit> {
        let sources = Source::ALL.iter().filter(|s| s.elements() == Elements::Stream);
        let tiles = || widths.iter().filter_map(|&width| heuristics::stream_tile(width));
        let of = |&source: &Source| {
            tiles().flat_map(move |tile| {
                [DType::F16, DType::BF16].map(|dtype| Unit {
                    source,
                    element: Some(dtype),
                    variant: Some(Variant::Stream(tile)),
                })
            })
        };
        if heuristics::has_streams(architecture) { sources.flat_map(of).collect() } else { vec![] }
    }

    /// Units that tuning data may ask for, the widest and the narrowest: what a check compiles beside all
    /// others.
    fn extremes() -> Vec<Unit> {
        let wide = WarpTile { tokens: 128, stages: 4, even_k: true };
        let narrow = WarpTile { tokens: 32, stages: 2, even_k: false };
        let even = (Source::LinearTile, Variant::Tiles { even_k: true });
        let warps = [wide, narrow].map(|tile| (Source::FusedMoePrefillMma, Variant::Warps(tile)));
        let of =
            |(source, variant)| Unit { source, element: Some(DType::BF16), variant: Some(variant) };
        warps.into_iter().chain([even]).map(of).collect()
    }

    fn name(self) -> String {
        let mut name = self.source.name().to_owned();
        if let Some(dtype) = self.element {
            let _ = write!(name, "-{dtype}");
        }
        if let Some(variant) = &self.variant {
            let _ = write!(name, "-{}", variant.suffix());
        }
        name
    }

    /// The text: the source, the constants, and an entry for each kernel.
    fn text(self) -> String {
        let element = match self.element {
            Some(DType::F16) => "amphora::f16",
            Some(DType::BF16) => "amphora::bf16",
            _ => "float",
        };
        let mut text = format!(
            "#include \"{}\"\n\nstruct Config {{\n  using Element = {element};\n",
            self.source.file()
        );
        for (constant, value) in [
            ("kTileRows", PRODUCT.rows),
            ("kTileCols", PRODUCT.cols),
            ("kTileDepth", PRODUCT.depth),
            ("kMaxHead", MAX_HEAD),
        ] {
            let _ = writeln!(text, "  static constexpr int {constant} = {value};");
        }
        for (constant, value) in self.variant.iter().flat_map(Variant::constants) {
            let _ = writeln!(text, "  static constexpr int {constant} = {value};");
        }
        text.push_str("};\n");
        for id in self.source.kernels() {
            let kernel = id.kernel();
            let (name, args, threads) = (kernel.name, kernel.args, kernel.threads);
            let bounds = match kernel.blocks {
                Some(blocks) => format!("{threads}, {blocks}"),
                None => threads.to_string(),
            };
            let _ = write!(
                text,
                "\nextern \"C\" __global__ void __launch_bounds__({bounds})\n\
                 {name}(const __grid_constant__ amphora::{args} args) {{\n  \
                 amphora::{name}<Config, {threads}>(args);\n}}\n"
            );
        }
        text
    }

    /// Everything but the compiler that can change the machine code: the unit's text, name and text of each
    /// file of `files` that it includes (in their order, which is that of names), the options, the
    /// architecture. A file that the unit does not include leaves its name, and so its compiled code.
    fn digest(self, files: &[File], architecture: &str) -> Digest {
        let mut digest = Digest::default();
        let text = self.text();
        digest.add(text.as_bytes());
        for file in included(files, &text) {
            digest.add(file.name.as_bytes());
            digest.add(file.text.as_bytes());
        }
        for option in OPTIONS {
            digest.add(option.as_bytes());
        }
        digest.add(architecture.as_bytes());
        digest
    }

    /// The name in the cache, without the compiler's version.
    fn stem(self, architecture: &str) -> String {
        format!("{}.{architecture}.{}", self.name(), self.digest(FILES, architecture))
    }

    fn compile(self, compiler: Compiler, architecture: &str) -> Result<nvrtc::Compiled> {
        let option = format!("--gpu-architecture={architecture}");
        let options: Vec<&str> = OPTIONS.into_iter().chain([option.as_str()]).collect();
        let (name, text) = (format!("{}.cu", self.name()), self.text());
        // Those that the name tells of and no others: were one left out, this would not compile.
        let files = included(FILES, &text);
        let files: Vec<_> = files.iter().map(|file| (file.name, file.text)).collect();
        compiler.compile(Program { name: &name, text: &text, files: &files, options: &options })
    }
}

/// Compiles `units` over the cores there are, each taking the next that is left, as they take from a
/// tenth of a second to several; results in the order of `units`.
fn compile(units: &[Unit], compiler: Compiler, architecture: &str) -> Result<Vec<nvrtc::Compiled>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(unit) = units.get(at) else { return done };
            done.push((at, unit.compile(compiler, architecture)));
        }
    };
    let mut cubins: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores.min(units.len())).map(|_| scope.spawn(work)).collect();
        let join = |worker: std::thread::ScopedJoinHandle<'_, Vec<_>>| {
            worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        workers.into_iter().flat_map(join).collect()
    });
    cubins.sort_by_key(|(at, _)| *at);
    cubins.into_iter().map(|(_, cubin)| cubin).collect()
}

/// Widths of expert products that are compiled ahead where no others are asked for: those of gpt-oss,
/// of Qwen3-30B-A3B and of the demo model.
pub const STREAM_WIDTHS: [usize; 4] = [2880, 2048, 768, 128];

/// A compiled unit.
#[derive(Debug)]
pub struct Compiled {
    /// Its file's name in a cache folder.
    pub name: String,
    /// Machine code.
    pub cubin: Vec<u8>,
    /// Kernels that lack registers.
    pub spills: Vec<Spill>,
    /// The assembler's words on kernels whose warpgroup products wait for each other.
    pub serialized: Vec<String>,
}

/// Compiles every unit for `architecture` (`sm_80`, `sm_90a`), weight streams for `widths`, or those alone
/// whose names hold `only`; needs no GPU.
///
/// # Errors
/// The compiler is missing, or refuses the architecture or a unit.
pub fn compile_all(
    architecture: &str,
    widths: &[usize],
    only: &str,
    nvrtc_dir: Option<&Path>,
) -> Result<Vec<Compiled>> {
    let compiler = Compiler::find(nvrtc_dir)?;
    let mut units = Unit::all();
    units.extend(Unit::ahead(architecture, widths));
    units.extend(Unit::extremes());
    units.retain(|unit| unit.name().contains(only));
    let compiled = compile(&units, compiler, architecture)?;
    let of = |(unit, nvrtc::Compiled { cubin, log }): (&Unit, _)| Compiled {
        name: cache::file_name(&unit.stem(architecture), compiler.version()),
        cubin,
        spills: spills::spills(&log),
        serialized: spills::serialized(&log),
    };
    Ok(units.iter().zip(compiled).map(of).collect())
}

/// Where machine code came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    Cache,
    Compiler,
}

/// Machine code of a unit.
#[derive(Debug)]
pub(crate) struct Code {
    pub(crate) cubin: Vec<u8>,
    from: Origin,
}

impl Code {
    /// Compilations that it took.
    pub(crate) fn compiled(&self) -> u64 {
        u64::from(self.from == Origin::Compiler)
    }

    /// What the driver said of it, and for which kernel: where its memory is full no file is at fault; else
    /// one of the cache that is no longer what was compiled can be removed.
    pub(crate) fn refused(&self, error: Error, unit: Unit, config: &JitConfig) -> Error {
        let Error::Driver { call, code, message } = error else { return error };
        let unit = unit.name();
        let message = match (self.from, &config.cache_dir) {
            _ if code == OUT_OF_MEMORY => {
                format!("{message} (the GPU has no memory left for the code of kernel {unit})")
            }
            (Origin::Cache, Some(folder)) => format!(
                "{message} (kernel {unit} of {}: once its file there is removed, it is compiled anew)",
                folder.display()
            ),
            _ => message,
        };
        Error::Driver { call, code, message }
    }
}

/// Machine code of every unit and of those that are `asked` for beside them, from the cache, else from the
/// compiler.
pub(crate) fn load_all(
    config: &JitConfig,
    architecture: &str,
    asked: &[Unit],
) -> Result<Vec<(Unit, Code)>> {
    let cache = Cache::new(config.cache_dir.as_deref());
    let compiler = Compiler::find(config.nvrtc_dir.as_deref());
    let version = compiler.as_ref().ok().map(|compiler| compiler.version());
    let mut units = Unit::all();
    units.extend(asked.iter().filter(|unit| !units.contains(unit)).copied().collect::<Vec<_>>());
    let held = |unit: &Unit| {
        let cubin = cache.read(&unit.stem(architecture), version)?;
        Some(Code { cubin, from: Origin::Cache })
    };
    let mut found: Vec<_> = units.iter().map(held).collect();
    let missing: Vec<Unit> =
        units.iter().zip(&found).filter(|(_, cubin)| cubin.is_none()).map(|(u, _)| *u).collect();
    if !missing.is_empty() {
        let compiler =
            compiler.map_err(|error| needed(error, &missing[0], architecture, config))?;
        let mut compiled = compile(&missing, compiler, architecture)?.into_iter();
        for (unit, slot) in units.iter().zip(&mut found).filter(|(_, slot)| slot.is_none()) {
            let cubin = compiled.next().expect("one result for each missing unit").cubin;
            cache.write(&cache::file_name(&unit.stem(architecture), compiler.version()), &cubin);
            *slot = Some(Code { cubin, from: Origin::Compiler });
        }
    }
    Ok(units.into_iter().zip(found.into_iter().flatten()).collect())
}

/// Machine code of one unit, from the cache, else from the compiler.
pub(crate) fn load_one(config: &JitConfig, architecture: &str, unit: Unit) -> Result<Code> {
    let cache = Cache::new(config.cache_dir.as_deref());
    let compiler = Compiler::find(config.nvrtc_dir.as_deref());
    let version = compiler.as_ref().ok().map(|compiler| compiler.version());
    if let Some(cubin) = cache.read(&unit.stem(architecture), version) {
        return Ok(Code { cubin, from: Origin::Cache });
    }
    let compiler = compiler.map_err(|error| needed(error, &unit, architecture, config))?;
    let cubin = unit.compile(compiler, architecture)?.cubin;
    cache.write(&cache::file_name(&unit.stem(architecture), compiler.version()), &cubin);
    Ok(Code { cubin, from: Origin::Compiler })
}

/// Why the compiler's absence matters.
fn needed(error: Error, unit: &Unit, architecture: &str, config: &JitConfig) -> Error {
    let Error::Driver { call, code, message } = error else { return error };
    let cache = match &config.cache_dir {
        Some(folder) => format!("{} does not hold it", folder.display()),
        None => "there is no cache folder".to_owned(),
    };
    let unit = unit.name();
    Error::Driver {
        call,
        code,
        message: format!("{message} (kernel {unit} for {architecture} must be compiled: {cache})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::cubin;

    #[test]
    fn a_unit_names_its_constants_and_wraps_every_kernel() {
        let unit = Unit { source: Source::Linear, element: Some(DType::BF16), variant: None };
        let text = unit.text();
        for line in [
            "#include \"kernels/linear.cuh\"",
            "  using Element = amphora::bf16;",
            "  static constexpr int kTileRows = 16;",
            "lora_linear(const __grid_constant__ amphora::LoraLinearArgs args) {",
            "  amphora::lora_linear<Config, 256>(args);",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }

    #[test]
    fn whatever_can_change_the_code_changes_the_name() {
        let names: std::collections::BTreeSet<String> = ["sm_80", "sm_90a"]
            .iter()
            .flat_map(|arch| Unit::all().into_iter().map(|unit| unit.stem(arch)))
            .collect();
        assert_eq!(names.len(), 2 * Unit::all().len());
    }

    /// An upgrade compiles what it changed, and that alone.
    #[test]
    fn a_file_changes_the_names_of_the_units_that_include_it() {
        let changed = |name: &str| -> Vec<File> {
            let text = |file: &File| match file.name == name {
                true => Box::leak(format!("{}// more\n", file.text).into_boxed_str()),
                false => file.text,
            };
            FILES.iter().map(|file| File { name: file.name, text: text(file) }).collect()
        };
        let element = Some(DType::BF16);
        let linear = Unit { source: Source::Linear, element, variant: None };
        let swiglu = Unit { source: Source::Swiglu, element, variant: None };
        let moved = |unit: Unit, name: &str| {
            let digest = |files: &[File]| unit.digest(files, "sm_90a").to_string();
            digest(FILES) != digest(&changed(name))
        };
        assert!(moved(linear, "kernels/linear.cuh"), "its own source");
        assert!(moved(linear, "amphora/args_layout.h"), "through args.h");
        assert!(!moved(linear, "kernels/swiglu.cuh"), "not its own");
        assert!(moved(swiglu, "kernels/swiglu.cuh") && !moved(swiglu, "kernels/linear.cuh"));
        let files = included(FILES, &swiglu.text());
        for file in FILES {
            assert_eq!(moved(swiglu, file.name), files.contains(&file), "{}", file.name);
        }
    }

    /// Needs the compiler, and no GPU.
    #[test]
    fn every_unit_compiles_for_every_architecture() {
        let config = JitConfig::from_environment();
        if let Err(error) = Compiler::find(config.nvrtc_dir.as_deref()) {
            println!("NOT RUN: {error}");
            return;
        }
        for architecture in ["sm_80", "sm_90a", "sm_100a"] {
            let streams = Unit::ahead(architecture, &STREAM_WIDTHS[..1]);
            let compiled =
                compile_all(architecture, &STREAM_WIDTHS[..1], "", config.nvrtc_dir.as_deref())
                    .expect("it compiles");
            let all = Unit::all().len() + streams.len() + Unit::extremes().len();
            assert_eq!(compiled.len(), all);
            for spill in compiled.iter().flat_map(|unit| &unit.spills) {
                assert!(spill.is_accepted(), "{architecture}: {spill}");
            }
            let serialized: Vec<_> = compiled.iter().flat_map(|unit| &unit.serialized).collect();
            assert!(serialized.is_empty(), "{architecture}: {serialized:?}");
            for code in compiled.iter().map(|unit| &unit.cubin) {
                assert!(cubin::is_whole(code) && !cubin::is_whole(&code[..code.len() - 1]));
            }
        }
        let error =
            compile_all("sm_1", &[], "", config.nvrtc_dir.as_deref()).expect_err("no such GPU");
        assert!(!error.to_string().contains('\n'), "{error}");
    }

    #[test]
    fn a_file_that_the_driver_refuses_is_named() {
        let config = JitConfig { cache_dir: Some("kept".into()), ..JitConfig::default() };
        let error =
            |code| Error::Driver { call: "cuModuleLoadData", code, message: "no".to_owned() };
        let refused = |from, code| {
            let unit = Code { cubin: Vec::new(), from };
            unit.refused(error(code), Unit::all()[0], &config)
        };
        let text = refused(Origin::Cache, 200).to_string();
        assert!(text.contains(&Unit::all()[0].name()) && text.contains("kept"), "{text}");
        assert_eq!(refused(Origin::Compiler, 200), error(200), "nothing to remove");
        // A full GPU says nothing of the file.
        for from in [Origin::Cache, Origin::Compiler] {
            let text = refused(from, OUT_OF_MEMORY).to_string();
            assert!(text.contains(&Unit::all()[0].name()) && text.contains("memory"), "{text}");
            assert!(!text.contains("kept") && !text.contains("removed"), "{text}");
        }
    }

    /// A full cache serves a machine without a compiler; an empty one says what is needed.
    #[test]
    fn a_full_cache_needs_no_compiler() {
        let folder = std::env::temp_dir().join(format!("amphora-jit-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let config = JitConfig { cache_dir: Some(folder.clone()), ..JitConfig::default() };
        let cache = Cache::new(config.cache_dir.as_deref());
        // The newest there is: were a compiler found, its own version would be looked for and be missed.
        for unit in Unit::all() {
            cache.write(
                &cache::file_name(&unit.stem("sm_00"), (99, 0)),
                &cubin::tests::holding(b"code"),
            );
        }
        let loaded: Vec<_> =
            Unit::all().iter().filter_map(|unit| cache.read(&unit.stem("sm_00"), None)).collect();
        assert_eq!(loaded.len(), Unit::all().len());
        let found = cache.read(&Unit::all()[0].stem("sm_00"), Some((98, 0)));
        assert_eq!(found, None, "another compiler's code is not this one's");
        std::fs::remove_dir_all(&folder).expect("it was made above");
    }
}
