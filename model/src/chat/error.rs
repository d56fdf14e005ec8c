//! What a chat template can answer instead of text.

/// By what the caller does next: the operator's file is bad, the client's messages are, or the conversation is rebased.
#[derive(Debug, thiserror::Error)]
pub enum ChatError {
    /// The template is not valid.
    #[error("chat template: {0}")]
    Template(String),
    /// The template refused these messages through `raise_exception`: the client's mistake.
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    /// Rendering failed, or did not end within its budget of instructions.
    #[error("rendering the chat template failed: {0}")]
    Render(String),
    /// The template changes what it rendered before: rebase the conversation.
    #[error("the chat template does not append to its earlier output: {0}")]
    NotPrefixStable(&'static str),
    #[error("{path}: {source}")]
    Io { path: std::path::PathBuf, source: std::io::Error },
}
