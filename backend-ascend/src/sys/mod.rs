//! The vendor's C ABI: signatures as declared, no logic.
//!
//! `acl.h` declares what is used; `bindings.rs` is made from it and committed, so that a build needs
//! neither CANN nor libclang. Every function is an optional field, filled by name at run time. To
//! regenerate after a change of `acl.h` (bindgen-cli 0.73.2):
//!
//! ```text
//! bindgen acl.h --dynamic-loading Acl --wrap-unsafe-ops --rust-edition 2024 --rust-target 1.85 \
//!   --allowlist-function 'acl.*' --allowlist-type 'acl.*' --allowlist-var 'ACL_.*' \
//!   --no-layout-tests --no-doc-comments --default-macro-constant-type signed \
//!   --raw-line '//! Generated from `acl.h`; see `mod.rs` for the command. Not to be edited.' \
//!   -o bindings.rs
//! ```

#[allow(
    non_camel_case_types,
    non_snake_case,
    dead_code,
    missing_docs,
    missing_debug_implementations,
    clippy::all,
// Generated: each block forwards to a looked-up function under its caller's obligations.
    clippy::undocumented_unsafe_blocks
)]
#[rustfmt::skip]
mod bindings;
mod loader;

pub(crate) use bindings::*;
pub(crate) use loader::Api;

/// Calls a vendor function by name: its code, or an error that names the missing symbol. Expands to
/// a plain call, so the caller's `unsafe` block and its reasons stand around it.
macro_rules! invoke {
    ($api:expr, $name:ident($($arg:expr),* $(,)?)) => {
        match $api.table().$name.as_ref() {
            Ok(function) => Ok(function($($arg),*)),
            Err(_) => Err($api.missing(stringify!($name))),
        }
    };
}
pub(crate) use invoke;
