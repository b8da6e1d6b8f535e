// What the examples use of Node: enough to check them without its types.
declare const process: {
  env: Record<string, string | undefined>;
  argv: string[];
  stdout: { write(text: string): void };
};
declare module "node:fs" {
  export function openAsBlob(path: string): Promise<Blob>;
}
